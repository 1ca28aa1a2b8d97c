"""Graphics cards on the PCI bus: their memory node, and what the link between them and the host can do.

Read from sysfs alone, without a driver; below `root`, so that tests can put up other machines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.hardware.files import ROOT, read_count, read_text

_DEVICES = "sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class 03xxxx: display controllers, "3D controllers" of servers included
_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s")
_GENERATION = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130}
LANE_BYTES[6] = 64e9 / 8 * 242 / 256  # flits of 256 bytes with 242 of payload
WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True)
class Link:
    """A PCIe link. generation, width: what card, slot and every bridge between allow.

    now_generation, now_width: what is negotiated at this moment, 0 = unknown. An idle card lowers its
    generation (to 1, often) and raises it within microseconds when there is work: no reason for concern.
    """

    generation: int
    width: int
    now_generation: int = 0
    now_width: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes/s one way after line coding, before packet headers: 15.75 GB/s for 3.0 x16 (PCI-SIG)."""
        return LANE_BYTES[self.generation] * self.width

    def describe(self) -> str:
        """For example "PCIe 3.0 x16 (now 1.0: an idle card lowers its link)"."""
        text = f"PCIe {self.generation}.0 x{self.width}"
        if 0 < self.now_generation < self.generation:
            text += f" (now {self.now_generation}.0: an idle card lowers its link)"
        return text


@dataclass(frozen=True)
class PciDevice:
    """A graphics card. device: its PCI device id, four hexadecimal digits. node: None = unknown."""

    address: str
    device: str
    node: int | None
    link: Link | None


def graphics_cards(root: Path = ROOT) -> tuple[PciDevice, ...]:
    """NVIDIA cards in the order of their addresses."""
    base = root / _DEVICES
    try:
        entries = sorted(base.iterdir())
    except OSError:
        return ()
    return tuple(_card(entry) for entry in entries if _is_card(entry))


def _is_card(folder: Path) -> bool:
    return read_text(folder / "vendor") == _NVIDIA and (read_text(folder / "class") or "").startswith(
        _DISPLAY
    )


def _card(entry: Path) -> PciDevice:
    folder = entry.resolve()  # below the bridges that it hangs from
    device = (read_text(folder / "device") or "").removeprefix("0x").lower()
    return PciDevice(entry.name, device, _node(folder), _link(folder))


def _path(folder: Path) -> Iterator[Path]:
    """The card and every bridge above it."""
    while (folder / "vendor").is_file() or (folder / "max_link_speed").is_file():
        yield folder
        folder = folder.parent


def _node(folder: Path) -> int | None:
    """The card's node; -1 says that the firmware did not tell, a bridge above may know."""
    for part in _path(folder):
        node = read_count(part / "numa_node")
        if node is not None and node < 1 << 16:
            return node
    return None


def _link(folder: Path) -> Link | None:
    """What the whole path allows: a card of generation 4 in a slot of generation 3 has a 3.0 link.

    The width is the negotiated one when that is lower than the possible one: it does not follow the load,
    so fewer lanes are wired (or in contact).
    """
    speeds = [speed for part in _path(folder) if (speed := _speed(part, "max_link_speed"))]
    widths = [width for part in _path(folder) if (width := _width(part, "max_link_width"))]
    if not speeds or not widths:
        return None
    now_speed, now_width = _speed(folder, "current_link_speed"), _width(folder, "current_link_width")
    width = min(widths)
    return Link(min(speeds), min(width, now_width) if now_width else width, now_speed, now_width)


def _speed(folder: Path, name: str) -> int:
    """Generation of "8.0 GT/s PCIe"; 0 for "Unknown" and anything else."""
    found = _SPEED.match(read_text(folder / name) or "")
    return _GENERATION.get(found[1].removesuffix(".0"), 0) if found else 0


def _width(folder: Path, name: str) -> int:
    """Lanes; 0 for 255, which a link that is down shows."""
    width = read_count(folder / name)
    return width if width in WIDTHS else 0
