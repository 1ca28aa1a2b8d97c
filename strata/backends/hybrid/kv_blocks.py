"""KV pages in the device region, as attention asks for them: blocks of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.core import Batch
from strata.core import Sequence as Tokens
from strata.device.base import Buffer
from strata.memory.regions import DeviceRegion


class DeviceKv:
    """All pages in device memory. What streams pages from the host offers the same methods."""

    def __init__(self, region: DeviceRegion, spec: KvSpec, pages: int) -> None:
        """IndexError when the region has fewer than `pages` pages."""
        self.spec = spec
        self.pages = [region.page(index) for index in range(pages)]
        self._addresses = np.array([page.address for page in self.pages], np.uint64)

    def blocks(self, layer: int, sequence: Tokens) -> list[Buffer]:
        """The layer's block of every page that holds a token of the sequence, in order."""
        size = self.spec.layer_bytes
        return [self.pages[page].slice(layer * size, size) for page in self._used(sequence).tolist()]

    def addresses(self, batch: Batch) -> NDArray[np.uint64]:
        """Where the pages of all sequences begin, sequence after sequence."""
        used = np.concatenate([self._used(sequence) for sequence in batch.sequences])
        found: NDArray[np.uint64] = self._addresses[used]
        return found

    def copies(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[Buffer, Buffer]]:
        """(target, source) of whole pages, from (source, target) numbers."""
        return [(self.pages[target], self.pages[source]) for source, target in pairs]

    def begin_layer(self, layer: int) -> None:
        """Attention of the layer comes next: nothing to bring."""

    def end_layer(self, layer: int) -> None:
        """Attention of the layer was launched: nothing to write back."""

    def _used(self, sequence: Tokens) -> NDArray[np.int32]:
        return sequence.pages[: -(-(sequence.start + sequence.count) // self.spec.page_tokens)]
