"""Belady's rule: evict what is needed again last. It needs the future, so it runs on traces only.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5
(1966); with the freedom to leave a miss out of the cache, which the other policies have as well. For experts
of equal size no policy of the same cache can have more hits; tests compare it with an exhaustive search.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

from strata.core import ExpertId
from strata.memory.policies.base import Evictable, Policy
from strata.memory.policies.ranking import Ranking

NEVER = sys.maxsize
"""Next use of an expert that is not needed again."""


class Future:
    """The accesses of a whole trace: for each expert the numbers of the accesses that use it.

    Takes 8 bytes per expert and access: 400 MB for 50 million of them.
    """

    def __init__(self, accesses: Iterable[tuple[int, Sequence[int]]]) -> None:
        self.uses: defaultdict[ExpertId, array[int]] = defaultdict(lambda: array("q"))
        for number, (layer, experts) in enumerate(accesses):
            for index in experts:
                self.uses[ExpertId(layer, index)].append(number)


class BeladyPolicy(Policy):
    """Evicts the expert whose next use is farthest, admits one only if it is needed before that.

    The accesses must be those that `future` was made of, in their order.
    """

    def __init__(self, future: Future) -> None:
        self._uses = future.uses
        self._done: defaultdict[ExpertId, int] = defaultdict(int)  # uses that have happened
        self._ranking = Ranking()  # by the negative of the next use

    def on_access(self, layer: int, experts: Sequence[int]) -> None:
        """Advances to the next use of each."""
        for index in experts:
            expert = ExpertId(layer, index)
            self._done[expert] += 1
            if expert in self._ranking:
                self._ranking.set(expert, -self._next_use(expert))

    def on_insert(self, expert: ExpertId) -> None:
        """Ranked by its next use."""
        self._ranking.set(expert, -self._next_use(expert))

    def on_evict(self, expert: ExpertId) -> None:
        """Not ranked any more."""
        self._ranking.remove(expert)

    def victim(self, evictable: Evictable) -> ExpertId | None:
        """The one needed last that may go."""
        return self._ranking.first(evictable)

    def admits(self, candidate: ExpertId, victim: ExpertId) -> bool:
        """Only what is needed sooner."""
        return self._next_use(candidate) < self._next_use(victim)

    def by_worth(self, experts: Sequence[ExpertId]) -> list[ExpertId]:
        """Soonest first."""
        return sorted(experts, key=lambda expert: (self._next_use(expert), expert))

    def _next_use(self, expert: ExpertId) -> int:
        uses = self._uses.get(expert, ())
        done = self._done[expert]
        return uses[done] if done < len(uses) else NEVER
