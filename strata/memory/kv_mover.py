"""Moves KV pages between the device region and a page-locked host pool, each as one copy."""

from __future__ import annotations

from collections.abc import Callable

from strata.device.base import Buffer, Copy, Device, Stream
from strata.memory.transfer import Priority, Transfer
from strata.memory.transfers import TransferQueue


class KvMover:
    """A `kv_places.PageMover` over a transfer queue.

    page: the device buffer of a place (`DeviceRegion.page`). pool: host memory for whole pages, one after the
    other. compute: the stream whose work reads and writes pages; what it does with pages elsewhere must be
    ordered into it.
    """

    def __init__(
        self,
        device: Device,
        queue: TransferQueue,
        page: Callable[[int], Buffer],
        pool: Buffer,
        page_bytes: int,
        compute: Stream,
    ) -> None:
        self._device = device
        self._queue = queue
        self._page = page
        self._pool = pool
        self._page_bytes = page_bytes
        self._compute = compute
        self._used = device.event()  # after all work that was given to the device before the moves
        self._is_recorded = False

    def move(self, device: int, host: int, outward: bool) -> Transfer:
        """Queue the copy of a page; it comes after what was given to the compute stream so far."""
        if not self._is_recorded:
            self._device.record(self._used, self._compute)
            self._is_recorded = True
        here, there = self._page(device), self._pool.slice(host * self._page_bytes, self._page_bytes)
        copy = Copy(there, here) if outward else Copy(here, there)
        priority = Priority.NEXT if outward else Priority.NOW
        return self._queue.submit([copy], priority, self._queue.layer, [self._used])

    def cancel(self, move: Transfer) -> bool:
        """Only a move that was not issued can be cancelled."""
        return self._queue.cancel(move)

    def order(self, move: Transfer) -> None:
        """The compute stream waits for the move."""
        self._queue.wait(self._compute, move)

    def finish(self, move: Transfer) -> None:
        """The host waits for the move."""
        self._queue.finish(move)

    def poll(self) -> None:
        """Ask the device. What it is given from now on is new work."""
        self._queue.poll()
        self._is_recorded = False

    def issue(self) -> None:
        """Moves of one direction go as one batch."""
        self._queue.pump()

    def is_quiet(self) -> bool:
        """Ask the compute stream."""
        return self._device.query(self._compute)
