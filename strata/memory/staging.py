"""Two pinned buffers through which plain host memory crosses: one fills while the other is on the bus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strata.device.base import Buffer, Copy, Device, Event, Stream
from strata.errors import CapacityError
from strata.memory.regions import aligned
from strata.memory.transfer import Direction, TransferStatistics


class StagingBuffer:
    """owner: number of the load that uses it, 0 = free. event: after the device's last use.

    arrivals: copies from here to plain memory that the host makes when the event is reached.
    """

    __slots__ = ("arrivals", "buffer", "event", "owner")

    def __init__(self, buffer: Buffer, event: Event) -> None:
        self.buffer = buffer
        self.event = event
        self.owner = 0
        self.arrivals: list[Copy] = []


class Staging:
    """The two buffers, used in turn. The calling thread does the host's half of every copy."""

    def __init__(self, device: Device, nbytes: int, statistics: TransferStatistics) -> None:
        self._device = device
        self._nbytes = nbytes
        self._statistics = statistics
        names = ("staging 0", "staging 1") if nbytes else ()
        self._buffers = [StagingBuffer(device.host_alloc(nbytes, name), device.event()) for name in names]

    def move(
        self, copies: Sequence[Copy], direction: Direction, stream: Stream, owner: int, label: str
    ) -> None:
        """Enqueue copies whose host side is pageable. Copies to the host end in `settle`."""
        if not self._buffers:
            raise CapacityError(
                f"{copies[0].src} or {copies[0].dst} is not page-locked, and there are 0 staging bytes",
                remedy="register the memory, or set staging_bytes",
            )
        for load in _loads(copies, self._nbytes):
            staging = self._next(direction, stream)
            pieces = [(copy, staging.buffer.slice(start, copy.dst.nbytes)) for copy, start in load]
            if direction == "h2d":
                for copy, piece in pieces:
                    self._device.host_copy(piece, copy.src)
                crossing = [Copy(copy.dst, piece) for copy, piece in pieces]
            else:
                staging.arrivals = [Copy(copy.dst, piece) for copy, piece in pieces]
                crossing = [Copy(piece, copy.src) for copy, piece in pieces]
            self._device.copy_batch(crossing, stream, label)
            self._device.record(staging.event, stream)
            staging.owner = owner
            self._statistics.staged_bytes += sum(copy.dst.nbytes for copy in crossing)

    def settle(self, owner: int) -> None:
        """The host knows that the owner's copies have crossed: bring what arrived to where it belongs."""
        for staging in self._buffers:
            if staging.owner == owner:
                self._empty(staging)

    def _next(self, direction: Direction, stream: Stream) -> StagingBuffer:
        """The buffer that was used longest ago. If the device still uses it, whoever writes there next waits:
        the host when it fills it or has something to take out first, else the stream."""
        staging = self._buffers.pop(0)
        self._buffers.append(staging)
        if staging.owner and direction == "d2h" and not staging.arrivals:
            self._device.wait(stream, staging.event)
        elif staging.owner:
            self._statistics.staging_waits += 1
            self._device.sync(staging.event)
            self._empty(staging)
        return staging

    def _empty(self, staging: StagingBuffer) -> None:
        for copy in staging.arrivals:
            self._device.host_copy(copy.dst, copy.src)
        staging.arrivals = []
        staging.owner = 0


def _loads(copies: Sequence[Copy], capacity: int) -> Iterator[list[tuple[Copy, int]]]:
    """Cut copies into pieces and pack these into loads of one staging buffer: (piece, its offset there)."""
    load: list[tuple[Copy, int]] = []
    used = 0
    for copy in copies:
        done = 0
        while done < copy.dst.nbytes:
            if used >= capacity:
                yield load
                load, used = [], 0
            size = min(copy.dst.nbytes - done, capacity - used)
            load.append((Copy(copy.dst.slice(done, size), copy.src.slice(done, size)), used))
            done += size
            used += aligned(size)
    yield load
