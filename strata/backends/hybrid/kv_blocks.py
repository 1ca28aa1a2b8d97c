"""KV pages in the device region, as attention asks for them: blocks of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata import core
from strata.backends.base import KvSpec
from strata.backends.hybrid.memory import HybridMemory
from strata.core import Batch
from strata.device.base import Buffer
from strata.memory.host_arena import host_arena
from strata.memory.kv_mover import KvMover
from strata.memory.kv_places import Border, PageMover
from strata.memory.locked_pieces import locked_if_possible


class DeviceKv:
    """All pages in device memory. What streams pages from the host offers the same methods.

    A page's number is its place in the region. most_pages: how many there can be, once expert slots gave what
    they may (`border`); those beyond the first ones exist only while the border leaves room for them. place:
    what memory it is, for the log.
    """

    def __init__(self, memory: HybridMemory, spec: KvSpec, most_pages: int, border: Border | None) -> None:
        self.spec = spec
        self.most_pages = most_pages
        self.border = border
        self.place = "device memory"
        self._memory = memory
        self._pool: Buffer | None = None
        self.host_memory: NDArray[np.uint8] | None = None
        self._addresses = np.zeros(0, np.uint64)

    def mover(self, host_pages: int) -> PageMover:
        """Moves pages to and from a page-locked pool of `host_pages` pages, which is taken now."""
        memory, nbytes = self._memory, self.spec.page_bytes
        arena = host_arena(host_pages * nbytes)
        self._pool = locked_if_possible(memory.device, arena.memory, "KV pool")
        self.host_memory = arena.memory
        self.place = f"device memory; pool: {arena.describe()}"
        return KvMover(memory.device, memory.queue, memory.region.page, self._pool, nbytes, memory.compute)

    def blocks(self, layer: int, sequence: core.Sequence) -> list[Buffer]:
        """The layer's block of every page that holds a token of the sequence, in order."""
        size, page = self.spec.layer_bytes, self._memory.region.page
        return [page(index).slice(layer * size, size) for index in self._used(sequence).tolist()]

    def addresses(self, batch: Batch) -> NDArray[np.uint64]:
        """Where the pages of all sequences begin, sequence after sequence."""
        used = np.concatenate([self._used(sequence) for sequence in batch.sequences])
        known, region = len(self._addresses), self._memory.region
        if region.pages > known:  # a place's address never changes
            added = [region.page(index).address for index in range(known, region.pages)]
            self._addresses = np.append(self._addresses, np.array(added, np.uint64))
        found: NDArray[np.uint64] = self._addresses[used]
        return found

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Whole pages, (source, target) after (source, target), on the compute stream."""
        page = self._memory.region.page
        for source, target in pairs:
            self._memory.device.copy(page(target), page(source), self._memory.compute, "copy of a page")

    def offset(self, layer: int) -> int:
        """Bytes from a page's start to its block of a layer."""
        return layer * self.spec.layer_bytes

    def begin_layer(self, layer: int) -> None:
        """Attention of the layer comes next: nothing to bring."""

    def end_layer(self, layer: int) -> None:
        """Attention of the layer was launched: nothing to write back."""

    def close(self) -> None:
        """Unlock the pool's memory, when nothing uses it any more; the region belongs to the device."""
        if self._pool is not None:
            self._memory.device.free(self._pool)
            self._pool = None

    def _used(self, sequence: core.Sequence) -> NDArray[np.int32]:
        return sequence.pages[: -(-(sequence.start + sequence.count) // self.spec.page_tokens)]
