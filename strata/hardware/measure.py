"""Speeds of this machine, measured, kept in a file per machine, and put into its profile."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.hardware.files import ROOT, read_text
from strata.hardware.profile import HardwareProfile, Rate

_VERSION = 1
_MAX_FILE = 1 << 16
_SLOWEST, _FASTEST = 1e6, 1e16


@dataclass(frozen=True)
class Measurement:
    """node_read: bytes/s by node index. core_macs: multiply-adds/s of one core.

    to_device, to_host: bytes/s of copies, None while no device was there to measure.
    """

    node_read: dict[int, float]
    core_macs: float
    to_device: float | None = None
    to_host: float | None = None


def measure_nodes(profile: HardwareProfile, read: Callable[[Sequence[int]], float]) -> dict[int, float]:
    """Read bandwidth of each node's memory; nodes without cores or without allowed memory are left out.

    read: bytes/s that threads bound to the CPUs given read from memory that they wrote first, which the
    kernel therefore took from their node.
    """
    return {node.index: read(node.cores) for node in profile.nodes if node.cores and node.usable}


def measured(profile: HardwareProfile, found: Measurement) -> HardwareProfile:
    """The profile with the measured speeds in it. A node that was not measured keeps its figure."""
    rates = [
        Rate(found.node_read[node.index], "measured") if node.index in found.node_read else rate
        for node, rate in zip(profile.nodes, profile.node_read, strict=True)
    ]
    processor = dataclasses.replace(profile.processor, core_macs=Rate(found.core_macs, "measured"))
    device = profile.device
    if device and found.to_device and found.to_host:
        copies = Rate(found.to_device, "measured"), Rate(found.to_host, "measured")
        device = dataclasses.replace(device, to_device=copies[0], to_host=copies[1])
    return dataclasses.replace(profile, processor=processor, node_read=tuple(rates), device=device)


def machine_key(profile: HardwareProfile, root: Path = ROOT) -> str:
    """What tells this machine, and what of it this process may use, from others: a hash for a file's name.

    Home directories are shared between machines, and a container sees less than its host.
    """
    device = profile.device
    facts = [
        _VERSION,
        read_text(root / "etc/machine-id"),
        profile.processor.name,
        profile.processor.isa,
        [(node.index, node.cores, node.memory >> 30, node.usable) for node in profile.nodes],
        device and (device.name, device.node, device.link and (device.link.generation, device.link.width)),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def load(folder: Path, key: str) -> Measurement | None:
    """What was measured before; None when there is nothing, or nothing that could be true."""
    try:
        with (folder / f"{key}.json").open("rb") as file:
            data = json.loads(file.read(_MAX_FILE))
        nodes = {int(index): _speed(value) for index, value in data["node_read"].items()}
        copies = [None if data[way] is None else _speed(data[way]) for way in ("to_device", "to_host")]
        return Measurement(nodes, _speed(data["core_macs"]), *copies)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _speed(value: Any) -> float:
    if type(value) not in (int, float) or not _SLOWEST <= value <= _FASTEST:
        raise ValueError(f"{value!r} is no speed")
    return float(value)


def save(folder: Path, key: str, found: Measurement) -> bool:
    """Keep it for the next time; False when it cannot be written, which costs seconds and nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump(dataclasses.asdict(found), file)
        Path(file.name).replace(folder / f"{key}.json")
    except OSError:
        return False
    return True
