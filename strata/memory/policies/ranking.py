"""Experts by a key that changes: the least one that may go, in O(log n)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from strata.core import ExpertId
from strata.memory.policies.base import Evictable


class Ranking:
    """A heap that is corrected late: an entry whose expert has another key by now is dropped in passing.

    Ties go to the smaller ExpertId.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, ExpertId]] = []
        self._keys: dict[ExpertId, float] = {}

    def __contains__(self, expert: ExpertId) -> bool:
        return expert in self._keys

    def set(self, expert: ExpertId, key: float) -> None:
        """Rank an expert, or change its key."""
        if self._keys.get(expert) == key:
            return
        self._keys[expert] = key
        heappush(self._heap, (key, expert))
        if len(self._heap) > 2 * len(self._keys) + 64:  # mostly stale: rebuilding costs O(1) per set
            self._heap = [(current, ranked) for ranked, current in self._keys.items()]
            heapify(self._heap)

    def remove(self, expert: ExpertId) -> None:
        """Take an expert out; KeyError when it is not ranked."""
        del self._keys[expert]

    def first(self, evictable: Evictable) -> ExpertId | None:
        """The least that may go; it stays ranked."""
        skipped = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            key, expert = entry
            if self._keys.get(expert) != key:
                continue
            skipped.append(entry)
            found = expert if evictable(expert) else None
        for entry in skipped:
            heappush(self._heap, entry)
        return found
