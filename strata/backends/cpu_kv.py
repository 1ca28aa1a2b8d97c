"""The CPU backend's KV cache: pages of one block each, anywhere in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.memory.host_arena import host_arena

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


class CpuKvCache:
    """KV pages of all layers, over memory that it was given or took itself.

    The layout within a page is csrc/cpu/kv_cache.h's. `handle` is what the C++ ops take; it keeps the memory
    alive. place: what memory it is, for the log.
    """

    def __init__(self, extension: Any, spec: KvSpec, memory: Bytes, offsets: Offsets, place: str) -> None:
        """memory: u8 [bytes]; page i begins `offsets[i]` bytes behind its start, wherever that is.

        A page has `spec.page_bytes` bytes and begins at an address that is a multiple of 64. A page's former
        contents do not matter. ValueError when a page leaves the memory.
        """
        self.spec = spec
        self.place = place
        self._memory = memory
        self._offsets = offsets.tolist()
        self.handle = extension.KvCache(
            spec.storage,
            spec.layers,
            spec.kv_heads,
            spec.key_dim,
            spec.value_dim,
            spec.page_tokens,
            spec.value_in_key,
            spec.layer_bytes,
            memory,
            offsets,
            spec.group,
            np.array(spec.steps, np.float32).reshape(-1),
        )

    @classmethod
    def allocate(cls, extension: Any, spec: KvSpec, pages: int, nodes: Sequence[int] = ()) -> CpuKvCache:
        """`pages` pages one after the other in an arena of their own, spread over memory nodes `nodes`."""
        arena = host_arena(pages * spec.page_bytes, nodes)
        offsets = np.arange(pages, dtype=np.int64) * spec.page_bytes
        return cls(extension, spec, arena.memory, offsets, arena.describe())

    @property
    def host_memory(self) -> Bytes:
        """All of it, u8."""
        return self._memory

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self._offsets)

    def page(self, index: int) -> Bytes:
        """The bytes of one page."""
        start = self._offsets[index]
        return self._memory[start : start + self.spec.page_bytes]

    def copy_page(self, source: int, target: int) -> None:
        """All layers of one page to another."""
        self.page(target)[:] = self.page(source)
