"""The device's memory, taken in one piece at start and cut: static weights, slots and pages, workspace.

    | static weights | slot 0, slot 1, ... >   border   < ..., page 1, page 0 | workspace |

Slots grow from the low end of the shared area, pages from the high end, so that an index keeps its address
for as long as it exists. The border between them moves in whole slots while the program runs. Who holds
which slot and which page is the business of the expert cache and of the KV pages; here are only addresses
and sums. Nothing here calls the device after the one allocation, and nothing waits: whoever gives bytes a new
meaning orders the first write after the last use of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from strata.device.base import Buffer, Device
from strata.errors import CapacityError

ALIGNMENT = 256
"""What cudaMalloc promises for an allocation; kept for every part, so that wide loads never straddle."""


def aligned(nbytes: int) -> int:
    """Bytes up to the next boundary of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RegionSizes:
    """How to cut: bytes of the three parts, and of one slot (an expert's record) and one KV page.

    shared: slots and pages together. CapacityError when a size is negative or a slot has no bytes.
    """

    static: int
    shared: int
    workspace: int
    slot_bytes: int
    page_bytes: int

    def __post_init__(self) -> None:
        least = min(self.static, self.shared, self.workspace)
        if least < 0 or self.slot_bytes <= 0 or self.page_bytes <= 0:
            raise CapacityError(
                f"the device's memory cannot be cut like this: {self}",
                remedy="parts have 0 or more bytes, slots and pages at least one",
            )

    @property
    def total(self) -> int:
        """Bytes of the one allocation."""
        return aligned(self.static) + aligned(self.shared) + aligned(self.workspace)

    @property
    def most_slots(self) -> int:
        """Slots when there is no page."""
        return aligned(self.shared) // aligned(self.slot_bytes)

    def pages_beside(self, slots: int) -> int:
        """Pages for which `slots` slots leave room."""
        return (aligned(self.shared) - slots * aligned(self.slot_bytes)) // aligned(self.page_bytes)


@dataclass(frozen=True)
class Level:
    """How full a part is: bytes used, bytes there are, and the most that were ever used."""

    name: str
    used: int
    total: int
    peak: int


class Arena:
    """Takes aligned pieces from the low end of a buffer, in order, and gives them back in reverse order."""

    def __init__(self, name: str, buffer: Buffer | None, remedy: str) -> None:
        self.name = name
        self.used = 0
        self.peak = 0
        self.total = 0 if buffer is None else buffer.nbytes
        self._buffer = buffer
        self._remedy = remedy

    def take(self, nbytes: int, what: str) -> Buffer:
        """The next `nbytes` bytes, for `what`; CapacityError beyond the end."""
        if nbytes <= 0:
            raise CapacityError(f"{what} asks for {nbytes} bytes", remedy="ask for at least one byte")
        if self._buffer is None or self.used + aligned(nbytes) > self.total:
            raise CapacityError(
                f"{what} needs {nbytes} bytes of {self.name}, "
                f"{self.total - self.used} of {self.total} are free",
                remedy=self._remedy,
            )
        piece = self._buffer.slice(self.used, nbytes)
        self.used += aligned(nbytes)
        self.peak = max(self.peak, self.used)
        return piece

    @contextmanager
    def scope(self) -> Iterator[Arena]:
        """What is taken inside is free again afterwards; later ops on the same stream may use it anew."""
        start = self.used
        try:
            yield self
        finally:
            self.used = start

    def level(self) -> Level:
        """How full it is."""
        return Level(self.name, self.used, self.total, self.peak)


class DeviceRegion:
    """The one device allocation. `slots` slots exist at first, and all the pages for which there is room.

    static: an Arena for weights, which are never given back. workspace: an Arena for what a step needs.
    CapacityError when the device has less memory than `sizes.total`, or slots do not fit.
    """

    def __init__(self, device: Device, sizes: RegionSizes, slots: int) -> None:
        self.sizes = sizes
        self._require_slots(slots)
        self._slots = slots
        self._buffer = device.alloc(sizes.total, "device region")
        self._shared_start = aligned(sizes.static)
        self._shared_end = self._shared_start + aligned(sizes.shared)
        self.static = Arena("static weights", self._part(0, sizes.static), "plan again: the weights grew")
        workspace = self._part(self._shared_end, sizes.workspace)
        self.workspace = Arena("workspace", workspace, "lower engine.prefill_chunk or the number of requests")

    @property
    def slots(self) -> int:
        """Slots that exist: indices 0 to slots - 1."""
        return self._slots

    @property
    def pages(self) -> int:
        """Pages that exist: indices 0 to pages - 1."""
        return self.sizes.pages_beside(self._slots)

    def slot(self, index: int) -> Buffer:
        """The bytes of one slot: always the same for an index. IndexError when there is no such slot."""
        if not 0 <= index < self._slots:
            raise IndexError(f"slot {index} of {self._slots}")
        stride = aligned(self.sizes.slot_bytes)
        return self._buffer.slice(self._shared_start + index * stride, self.sizes.slot_bytes)

    def page(self, index: int) -> Buffer:
        """The bytes of one page: always the same for an index. IndexError when there is no such page."""
        if not 0 <= index < self.pages:
            raise IndexError(f"page {index} of {self.pages}")
        stride = aligned(self.sizes.page_bytes)
        return self._buffer.slice(self._shared_end - (index + 1) * stride, self.sizes.page_bytes)

    def move_border(self, slots: int, *, slots_in_use: int, pages_in_use: int) -> None:
        """Let there be `slots` slots, and pages in the rest.

        slots_in_use, pages_in_use: one more than the highest index that its owner holds. CapacityError, and
        no change, when one of those would cease to exist.
        """
        self._require_slots(slots)
        if slots < slots_in_use:
            raise CapacityError(
                f"{slots} expert slots are asked for, but slot {slots_in_use - 1} is in use",
                remedy="evict the experts of the last slots first",
            )
        pages = self.sizes.pages_beside(slots)
        if pages < pages_in_use:
            raise CapacityError(
                f"{slots} expert slots leave room for {pages} KV pages, "
                f"but page {pages_in_use - 1} is in use",
                remedy="ask for fewer slots, or move KV pages to the host first",
            )
        self._slots = slots

    def levels(self, slots_used: int, pages_used: int) -> tuple[Level, ...]:
        """Water levels of every part, given how many slots and pages their owners hold."""
        slot, page = aligned(self.sizes.slot_bytes), aligned(self.sizes.page_bytes)
        held = slots_used * slot, pages_used * page
        return (
            self.static.level(),
            Level("expert slots", held[0], self._slots * slot, held[0]),
            Level("KV pages", held[1], self.pages * page, held[1]),
            self.workspace.level(),
        )

    def check_integrity(self) -> None:
        """The parts fill the allocation, and slots end before pages begin (AssertionError)."""
        self._buffer.require_live()
        slots = self._slots * aligned(self.sizes.slot_bytes)
        pages = self.pages * aligned(self.sizes.page_bytes)
        shared = self._shared_end - self._shared_start
        if slots < 0 or pages < 0 or slots + pages > shared:
            raise AssertionError(f"slots of {slots} and pages of {pages} bytes share {shared}")
        for arena in (self.static, self.workspace):
            if not 0 <= arena.used <= arena.peak <= arena.total:
                raise AssertionError(f"{arena.name}: {arena.used} used, peak {arena.peak} of {arena.total}")
        if self._shared_end + aligned(self.sizes.workspace) != self._buffer.nbytes:
            raise AssertionError(f"the parts do not fill the {self._buffer.nbytes} bytes of the region")

    def _part(self, start: int, nbytes: int) -> Buffer | None:
        return self._buffer.slice(start, aligned(nbytes)) if nbytes else None

    def _require_slots(self, slots: int) -> None:
        if not 0 <= slots <= self.sizes.most_slots:
            raise CapacityError(
                f"{slots} expert slots of {self.sizes.slot_bytes} bytes are asked for, "
                f"{self.sizes.most_slots} fit in {self.sizes.shared} bytes",
                remedy="ask for fewer slots, or plan with more device memory",
            )
