"""Least frequently used, where a use counts for less the longer it is ago."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import Evictable, Policy
from strata.memory.policies.ranking import Ranking

HALF_LIFE_SLOTS = 64
"""Accesses per slot after which a use counts half. Of 4, 16, 64, 256 and 1024 this does best on the
open traces (docs/expert-policies.md)."""
SEED_STEPS = 64
"""What earlier runs count for: new traffic outweighs them after about as many steps."""


class LfuPolicy(Policy):
    """Evicts the expert with the smallest decayed number of uses; counts survive eviction.

    Decay is forward: instead of ageing all counts at every access, a new use weighs 2 ** (now / half-life),
    so that the order of experts never changes between their own uses and a heap can hold it. Counts are kept
    as binary logarithms, which cannot overflow.
    """

    def __init__(self, space: ExpertSpace, slots: int, half_life: float | None = None) -> None:
        self._fixed = half_life
        self._rate = 0.0
        self._weight = 0.0  # log2 of what a use counts now
        self._counts: dict[ExpertId, float] = {}
        self._ranking = Ranking()
        self.on_resize(slots)

    def on_resize(self, slots: int) -> None:
        """Uses from now on age at the pace of the new size."""
        self._rate = 1 / (self._fixed or HALF_LIFE_SLOTS * max(slots, 1))

    def on_access(self, layer: int, experts: Sequence[int]) -> None:
        """One use more for each."""
        for index in experts:
            expert = ExpertId(layer, index)
            self._weight += self._rate
            count = _log2_sum(self._counts.get(expert, -math.inf), self._weight)
            self._counts[expert] = count
            if expert in self._ranking:
                self._ranking.set(expert, count)

    def seed(self, layer: int, shares: NDArray[np.float64]) -> None:
        """As if the last steps had used each expert in its share of them."""
        for index in shares.nonzero()[0]:
            self._counts[ExpertId(layer, int(index))] = math.log2(shares[index] * SEED_STEPS)

    def on_insert(self, expert: ExpertId) -> None:
        """Ranked by the uses it had so far."""
        self._ranking.set(expert, self._counts.get(expert, -math.inf))

    def on_evict(self, expert: ExpertId) -> None:
        """Not ranked any more; its count stays."""
        self._ranking.remove(expert)

    def victim(self, evictable: Evictable) -> ExpertId | None:
        """The least used that may go."""
        return self._ranking.first(evictable)


def _log2_sum(a: float, b: float) -> float:
    """log2(2**a + 2**b); one of the two may be -inf."""
    high, low = (a, b) if a > b else (b, a)
    return high + math.log2(1.0 + 2.0 ** (low - high))
