"""KV pages in host memory: each layer's blocks cross to the device while the layer before it computes.

    buffer 0   | fetch 0 | attention 0 | write back 0 | fetch 2 | attention 2 | ...
    buffer 1             | fetch 1 ... | attention 1  | write back 1 | fetch 3 | ...

Two buffers on the device hold the blocks of one layer each, of every page that the pass reads or writes. What
attention appended goes back behind it. A page that only gets its first tokens is not fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from strata import core
from strata.backends.base import KvSpec
from strata.backends.hybrid.memory import HybridMemory
from strata.core import Batch
from strata.device.base import Buffer, Copy, Event
from strata.errors import CapacityError
from strata.memory.host_arena import host_arena
from strata.memory.locked_pieces import locked_if_possible
from strata.memory.transfer import Priority, Transfer

BUFFERS = 2


class StreamedKv:
    """Offers attention what `DeviceKv` does. A page's number is its place in the pool.

    staging: device memory for `blocks` pages' blocks of a layer, twice: the most distinct pages of a pass.
    """

    def __init__(self, memory: HybridMemory, spec: KvSpec, pages: int, staging: Buffer, blocks: int) -> None:
        self.spec = spec
        self._device, self._queue, self._compute = memory.device, memory.queue, memory.compute
        arena = host_arena(pages * spec.page_bytes)
        self.place = f"{arena.describe()}, two layers at a time on the device"
        self._pool = locked_if_possible(self._device, arena.memory, "KV pages")
        self.host_memory = arena.memory
        self._staging = staging
        self._blocks = blocks
        self._free: list[Event] = [self._device.event() for _ in range(BUFFERS)]
        self._slots: dict[int, int] = {}
        self._old: list[int] = []  # pages that hold tokens of earlier passes
        self._new: list[int] = []  # pages that get tokens in this one
        self._fetches: dict[int, Transfer | None] = {}
        # By layer: what the last pass, or this one, gave back. By buffer: what left it last.
        self._returns: dict[int, Transfer] = {}
        self._leaving: list[Transfer | None] = [None] * BUFFERS

    # -- what attention asks -------------------------------------------------------------------------------

    def addresses(self, batch: Batch) -> NDArray[np.uint64]:
        """Where the pages of all sequences are in buffer 0, sequence after sequence. A pass begins."""
        self._begin(batch)
        used = (page for sequence in batch.sequences for page in self._used(sequence))
        slots = np.array([self._slots[page] for page in used], np.uint64)
        start: NDArray[np.uint64] = slots * self.spec.layer_bytes + np.uint64(self._staging.address)
        return start

    def offset(self, layer: int) -> int:
        """Bytes from there to the layer's block."""
        return layer % BUFFERS * self._blocks * self.spec.layer_bytes

    def blocks(self, layer: int, sequence: core.Sequence) -> list[Buffer]:
        """The layer's block of every page that holds a token of the sequence, in order."""
        return [self._block(layer, page) for page in self._used(sequence)]

    def begin_layer(self, layer: int) -> None:
        """Attention comes next: it waits for its blocks, and for what still leaves the buffer."""
        fetch = self._fetches.pop(layer) if layer in self._fetches else self._fetch(layer, Priority.NOW)
        for transfer in (fetch, self._leaving[layer % BUFFERS]):
            if transfer is not None:
                self._queue.wait(self._compute, transfer)

    def end_layer(self, layer: int) -> None:
        """Attention was launched: what it appended goes back, then the next layer but one may come."""
        self._device.record(self._free[layer % BUFFERS], self._compute)
        copies = [Copy(self._host(layer, page), self._block(layer, page)) for page in self._new]
        after = [self._free[layer % BUFFERS]]
        leaving = self._queue.submit(copies, Priority.NEXT, self._queue.layer, after)
        self._returns[layer] = self._leaving[layer % BUFFERS] = leaving
        self._queue.pump()
        if layer + BUFFERS < self.spec.layers:
            self._fetches[layer + BUFFERS] = self._fetch(layer + BUFFERS, Priority.NEXT, BUFFERS)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Whole pages, (source, target) after (source, target), by the host, when it may touch them."""
        self._finish([*self._fetches.values(), *self._returns.values()])
        nbytes = self.spec.page_bytes
        for source, target in pairs:
            pieces = [self._pool.slice(page * nbytes, nbytes) for page in (target, source)]
            self._device.host_copy(*pieces)

    def close(self) -> None:
        """Unlock the pool's memory, when nothing uses it any more."""
        self._finish([*self._fetches.values(), *self._returns.values()])
        self._device.free(self._pool)

    # -- inside --------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """Give every page of the batch a place in the buffers, and let the first two layers come."""
        self._finish(self._fetches.values())  # of a pass that failed
        self._fetches = {}
        size = self.spec.page_tokens
        old, new = dict[int, None](), dict[int, None]()
        for sequence in batch.sequences:
            pages, stop = sequence.pages.tolist(), sequence.start + sequence.count
            old.update(dict.fromkeys(pages[: -(-sequence.start // size)]))
            new.update(dict.fromkeys(pages[sequence.start // size : -(-stop // size)]))
        self._old, self._new = list(old), list(new)
        self._slots = {page: slot for slot, page in enumerate({**old, **new})}
        if len(self._slots) > self._blocks:
            raise CapacityError(
                f"a pass reads {len(self._slots)} KV pages, the device's buffers hold {self._blocks}",
                remedy="lower model.context or engine.requests",
            )
        for event in self._free:
            self._device.record(event, self._compute)
        for layer in range(min(BUFFERS, self.spec.layers)):
            priority = Priority.NEXT if layer else Priority.NOW
            self._fetches[layer] = self._fetch(layer, priority, layer)
        self._queue.pump()

    def _fetch(self, layer: int, priority: Priority, ahead: int = 0) -> Transfer | None:
        """Let the layer's blocks come once their buffer is free, and what the last pass wrote has arrived."""
        copies = [Copy(self._block(layer, page), self._host(layer, page)) for page in self._old]
        if not copies:
            return None
        after = [self._free[layer % BUFFERS]]
        for transfer in (self._leaving[layer % BUFFERS], self._returns.get(layer)):
            if transfer is not None:
                after += self._queue.events_of(transfer)
        return self._queue.submit(copies, priority, self._queue.layer + ahead, after)

    def _finish(self, transfers: Iterable[Transfer | None]) -> None:
        for transfer in transfers:
            if transfer is not None:
                self._queue.finish(transfer)

    def _used(self, sequence: core.Sequence) -> list[int]:
        used: list[int] = sequence.pages[
            : -(-(sequence.start + sequence.count) // self.spec.page_tokens)
        ].tolist()
        return used

    def _block(self, layer: int, page: int) -> Buffer:
        size = self.spec.layer_bytes
        return self._staging.slice(self.offset(layer) + self._slots[page] * size, size)

    def _host(self, layer: int, page: int) -> Buffer:
        size = self.spec.layer_bytes
        return self._pool.slice(page * self.spec.page_bytes + layer * size, size)
