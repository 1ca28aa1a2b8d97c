"""What kernels of routed experts look up, made on the host from a group's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.hybrid.kernel_set import ExpertGroup
from strata.device.base import Buffer, ByValue

NEAR_WORDS = 256
"""csrc/cuda/expert_words.cuh: tables of so many words come with the launch itself."""


@dataclass(frozen=True)
class Tables:
    """What the kernels look up, as 4-byte words one after the other, how many of each there are, and how many
    pairs each expert has.

    addresses: two words per expert. A pair is one (row, choice); pairs are numbered expert by expert,
    ascending, so that a row's pairs are in the order of their experts when they are in that of their numbers.
    """

    words: NDArray[np.uint32]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Of all experts."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """Of one expert."""
        return max(self.counts, default=0)

    @classmethod
    def of(cls, group: ExpertGroup) -> Tables:
        """From the routes of a group."""
        rows = len(group.ids)
        chosen = [np.argwhere(group.ids == expert) for expert in group.experts]  # (row, choice), by rows
        counts = [len(found) for found in chosen]
        pairs = np.concatenate([*chosen, np.empty((0, 2), np.int64)])
        order = np.argsort(pairs[:, 0], kind="stable")
        first_of_token = np.searchsorted(pairs[order, 0], np.arange(rows + 1))
        parts: list[NDArray[Any]] = [
            np.array([record.address for record in group.records], np.uint64).view(np.uint32),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            pairs[:, 0].astype(np.int32),
            order.astype(np.int32),
            group.weights[pairs[order, 0], pairs[order, 1]].astype(np.float32),
            first_of_token.astype(np.int32),
        ]
        words = np.concatenate([part.view(np.uint32) for part in parts])
        return cls(words, tuple(len(part) for part in parts), tuple(counts))

    def near(self) -> ByValue | None:
        """All tables as a struct, None when they do not fit."""
        if len(self.words) > NEAR_WORDS:
            return None
        return ByValue(self.words.tobytes().ljust(4 * NEAR_WORDS, b"\0"))

    def slices(self, buffer: Buffer) -> list[Buffer]:
        """Each table's range; an empty one is given the word behind it."""
        ends = np.cumsum(self.sizes)
        starts = [int(end) - size for end, size in zip(ends, self.sizes, strict=True)]
        return [buffer.slice(4 * a, 4 * max(n, 1)) for a, n in zip(starts, self.sizes, strict=True)]
