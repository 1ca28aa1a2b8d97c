"""Memory slots as the firmware lists them (SMBIOS type 17); EDAC's count of modules where that is not there.

Source: DMTF DSP0134, System Management BIOS Reference Specification, 7.18 "Memory Device (Type 17)".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strata.hardware.files import ROOT

_TABLE = "sys/firmware/dmi/tables/DMI"
_EDAC = "sys/devices/system/edac/mc"
_MAX_TABLE = 1 << 20
_MEMORY_DEVICE, _END = 17, 127
_HEADER = 4
_SIZE, _LOCATOR, _BANK, _SPEED, _CONFIGURED = 0x0C, 0x10, 0x11, 0x15, 0x20
_UNKNOWN_SIZE, _UNKNOWN_SPEED = 0xFFFF, (0, 0xFFFF)
# A channel's name is what stands before the module's own: "NODE 1 CHANNEL 2" of "NODE 1 CHANNEL 2 DIMM 0",
# "P0 CHANNEL A", "CPU2_DIMM_B" of "CPU2_DIMM_B1", "P1-DIMMC" of "P1-DIMMC2".
_NAMED = re.compile(r".*CHANNEL[ _]?(?:\d+|[A-Z]\b)", re.I)
_LETTER = re.compile(r"(?:.*[^A-Z])?DIMM[ _-]?[A-P](?=\d{0,2}$)", re.I)


@dataclass(frozen=True)
class MemorySlot:
    """size: 0 = empty. speed, configured: MT/s that the module is made for and runs at, 0 = unknown."""

    locator: str
    bank: str
    filled: bool
    speed: int = 0
    configured: int = 0

    @property
    def channel(self) -> str:
        """The channel's name, "" where the firmware's words do not tell one."""
        for text in (self.bank, self.locator):
            found = _NAMED.match(text) or _LETTER.match(text)
            if found:
                return found[0]
        return ""


@dataclass(frozen=True)
class Channels:
    """total: channels there are; empty: names of those without a module. slower: modules by (MT/s that they
    run at, MT/s that they are made for). unknown: why nothing is known, with the fix; "" otherwise."""

    total: int = 0
    empty: tuple[str, ...] = ()
    slower: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unknown: str = ""
    fix: str = ""


def memory_channels(root: Path = ROOT) -> Channels:
    """Channels and what is in them."""
    try:
        with (root / _TABLE).open("rb") as file:
            slots = list(memory_slots(file.read(_MAX_TABLE)))
    except PermissionError:
        return Channels(unknown=f"/{_TABLE} is for root{_edac(root)}", fix="sudo strata doctor")
    except OSError:
        return Channels(unknown=f"there is no /{_TABLE}{_edac(root)}")
    if not slots:
        return Channels(unknown="the firmware lists no memory slots (virtual machines often do not)")
    filled = [slot for slot in slots if slot.filled]
    if not all(slot.channel for slot in slots):
        names = f"{slots[0].locator!r}, {slots[0].bank!r}"
        return Channels(
            unknown=f"{len(filled)} of {len(slots)} slots have a module, names like {names} tell no channels"
        )
    with_module = {slot.channel for slot in filled}
    every = sorted({slot.channel for slot in slots})
    slower = Counter((s.configured, s.speed) for s in filled if 0 < s.configured < s.speed)
    return Channels(len(every), tuple(name for name in every if name not in with_module), dict(slower))


def _edac(root: Path) -> str:
    """EDAC lists modules, not empty slots: enough to count them, not to miss any."""
    count = len(list((root / _EDAC).glob("mc*/dimm*")))
    return f" (EDAC lists {count} modules, and no empty slots)" if count else ""


def memory_slots(table: bytes) -> Iterator[MemorySlot]:
    """The memory devices of an SMBIOS table. What is cut off or contradicts itself ends the list."""
    at = 0
    while at + _HEADER <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.find(b"\0\0", at + length)
        if length < _HEADER or end < 0 or kind == _END:
            return
        if kind == _MEMORY_DEVICE and length > _BANK:
            yield _slot(table[at : at + length], table[at + length : end].split(b"\0"))
        at = end + 2


def _slot(part: bytes, strings: list[bytes]) -> MemorySlot:
    def text(at: int) -> str:
        index = part[at]
        known = 0 < index <= len(strings)
        return strings[index - 1].decode("ascii", "replace").strip() if known else ""

    def word(at: int) -> int:
        return int.from_bytes(part[at : at + 2], "little") if at + 2 <= len(part) else 0

    def speed(at: int) -> int:
        return 0 if word(at) in _UNKNOWN_SPEED else word(at)

    filled = word(_SIZE) not in (0, _UNKNOWN_SIZE)
    return MemorySlot(text(_LOCATOR), text(_BANK), filled, speed(_SPEED), speed(_CONFIGURED))
