"""What `strata doctor` says about a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strata.backends import isa
from strata.config import format_size
from strata.errors import StrataError
from strata.hardware.cpu import choose_cpus
from strata.hardware.files import format_cpu_list, read_text
from strata.hardware.numa import MemoryNode
from strata.hardware.numa_health import Finding, findings
from strata.hardware.profile import HardwareProfile, Rate
from strata.hardware.profile_file import load_profile
from strata.interfaces.gpu_report import describe_gpu, examine_gpu
from strata.interfaces.hardware import this_machine

_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine(asked: str | None = None, *, again: bool = False) -> tuple[HardwareProfile, dict[str, Any]]:
    """The machine, or the profile that `asked` names, and the same as plain data.

    Beside the profile: "threads" as a run would start them, "transparent_huge_pages", "gpu" (see
    `examine_gpu`), "findings": what costs speed here ("text") and what to do ("fix"), and "problem": what
    keeps Strata from running, or "".
    """
    if asked is not None:
        found = load_profile(asked)
        return found, {**found.to_json(), "isa": found.processor.isa, "problem": ""}
    found, chosen = this_machine(again=again), choose_cpus()
    found = dataclasses.replace(found, warnings=(*found.warnings, *chosen.warnings))
    return found, {
        **found.to_json(),
        "isa": found.processor.isa,
        "threads": chosen.describe(),
        "transparent_huge_pages": _chosen(read_text(_TRANSPARENT) or ""),
        "findings": [dataclasses.asdict(finding) for finding in findings(found)],
        "gpu": examine_gpu(measure=again),
        "problem": _problem(),
    }


def _problem() -> str:
    try:
        isa.choose_isa(isa.extension().features())
    except StrataError as error:
        return str(error)
    return ""


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never" -> "madvise"."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def describe(found: HardwareProfile, facts: dict[str, Any]) -> str:
    """A page for people."""
    processor = found.processor
    kernels = f"kernels: {processor.isa or 'none'}, {_macs(processor.core_macs)} a core"
    lines = [("machine", found.name), ("processor", f"{processor.name}, {kernels}")]
    if "threads" in facts:
        lines.append(("threads", f"{facts['threads']}{_quota(found)}"))
    for node, read in zip(found.nodes, found.node_read, strict=True):
        lines.append((f"NUMA node {node.index}", f"{_node(node)}; read at {_speed(read)}"))
        lines += [("huge pages", pages) for pages in _pages(node)]
    lines.append(("memory", f"{format_size(found.memory)}, {format_size(found.available)} free"))
    if "transparent_huge_pages" in facts:
        lines.append(("", f"transparent huge pages: {facts['transparent_huge_pages']}"))
    lines += [("device", text) for text in _device(found, facts)]
    lines += [("gpu" if number == 0 else "", text) for number, text in enumerate(_gpu(facts))]
    lines.append(("disk", f"read at {_speed(found.disk_read)}"))
    lines += [("note", text) for text in found.warnings]
    lines += [("finding", Finding(**finding).describe()) for finding in facts.get("findings", ())]
    if facts["problem"]:
        lines.append(("problem", facts["problem"]))
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _node(node: MemoryNode) -> str:
    far = "" if len(node.distances) < 2 else f", distances {' '.join(map(str, node.distances))}"
    shut = "" if node.usable else ", memory not allowed"
    cpus = f"CPUs {format_cpu_list(node.cpus)} ({len(node.cores)} cores)" if node.cpus else "no CPUs"
    return f"{cpus}, {format_size(node.memory)}, {format_size(node.free)} free{far}{shut}"


def _pages(node: MemoryNode) -> Iterator[str]:
    for pool in node.huge_pages:
        yield f"{pool.total} of {format_size(pool.size)} ({pool.free} free)"


def _device(found: HardwareProfile, facts: dict[str, Any]) -> Iterator[str]:
    device = found.device
    if device is None:
        if "gpu" not in facts:
            yield "none"
        elif facts["gpu"]["pci"]:
            yield "of no kind that Strata knows the speeds of"
        return  # without a card the lines about the GPU say it all
    link = device.link.describe() if device.link else "link unknown"
    yield f"{device.name}, {format_size(device.memory)}, at node {device.node}, {link}"
    yield f"reads at {_speed(device.read)}, {_macs(device.macs)}"
    yield f"copies in at {_speed(device.to_device)}, out at {_speed(device.to_host)}"


def _gpu(facts: dict[str, Any]) -> Iterator[str]:
    if "gpu" in facts:
        yield from describe_gpu(facts["gpu"])


def _quota(found: HardwareProfile) -> str:
    return "" if found.quota is None else f"; the control group grants {found.quota:g} CPUs' time"


def _speed(rate: Rate) -> str:
    return f"{rate.value / 1e9:.1f} GB/s ({rate.source})"


def _macs(rate: Rate) -> str:
    unit, name = (1e12, "TMAC/s") if rate.value >= 1e12 else (1e9, "GMAC/s")
    return f"{rate.value / unit:.1f} {name} ({rate.source})"
