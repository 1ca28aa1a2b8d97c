"""What an expert cache asks of its policy: whom to evict, and, as a question apart, whom to let in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace

Evictable = Callable[[ExpertId], bool]


class Policy(ABC):
    """Watches the accesses of one cache and ranks its experts. Bookkeeping only; never blocks, never copies.

    Deterministic: equal calls in equal order give equal answers (no clock, no random numbers, no set order).
    The cache reports an access once per layer and step with everything the router chose, hits and misses
    alike; it reports an insert when a slot is claimed, before the bytes are there, and an eviction when the
    slot is given up. A policy that raises has been called out of order: it checks nothing twice.
    """

    @abstractmethod
    def on_access(self, layer: int, experts: Sequence[int]) -> None:
        """The router of `layer` chose these distinct experts (indices), in the cache or not."""

    @abstractmethod
    def on_insert(self, expert: ExpertId) -> None:
        """`expert` has a slot from now on."""

    @abstractmethod
    def on_evict(self, expert: ExpertId) -> None:
        """`expert` has no slot any more."""

    @abstractmethod
    def victim(self, evictable: Evictable) -> ExpertId | None:
        """The expert to give up its slot first among those that `evictable` allows; None: it allows none.

        Changes nothing that a later answer depends on: the cache may ask and then not evict. Costs O(log
        slots) plus one step per expert that ranks lower but is not evictable: those are few, since held
        experts were accessed a moment ago.
        """

    def admits(self, candidate: ExpertId, victim: ExpertId) -> bool:
        """Whether `candidate` is worth the slot of `victim`. Asked only where no slot is free."""
        return True

    def by_worth(self, experts: Sequence[ExpertId]) -> list[ExpertId]:
        """The experts in the order in which they should be offered to the cache; best first."""
        return list(experts)

    def seed(self, layer: int, shares: NDArray[np.float64]) -> None:  # noqa: B027  # LRU has no use for it
        """Before the first access: the share `[experts]` of a layer's steps that used each, earlier."""

    def on_resize(self, slots: int) -> None:  # noqa: B027  # most rankings do not depend on the size
        """The cache has this many slots from now on."""


PolicyFactory = Callable[[ExpertSpace, int], Policy]
"""Makes the policy of a cache with this many slots over these experts."""
