"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import Evictable, Policy


class LruPolicy(Policy):
    """Evicts the expert whose last access is longest ago; those of one access go in the router's order."""

    def __init__(self, space: ExpertSpace, slots: int) -> None:
        self._order: OrderedDict[ExpertId, None] = OrderedDict()

    def on_access(self, layer: int, experts: Sequence[int]) -> None:
        """Moves those that have a slot to the end."""
        for index in experts:
            expert = ExpertId(layer, index)
            if expert in self._order:
                self._order.move_to_end(expert)

    def on_insert(self, expert: ExpertId) -> None:
        """The newest."""
        self._order[expert] = None

    def on_evict(self, expert: ExpertId) -> None:
        """Forgotten at once."""
        del self._order[expert]

    def victim(self, evictable: Evictable) -> ExpertId | None:
        """The oldest that may go."""
        return next((expert for expert in self._order if evictable(expert)), None)
