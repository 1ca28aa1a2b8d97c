"""The draft length of one request by the rule of its recent acceptance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from strata.core import MOST_DRAFTED

STEP = 2
GROW_ABOVE, SHRINK_BELOW = 0.75, 0.5
ROUNDS = 4
"""Verifications that count as recent."""


@dataclass(frozen=True)
class LengthOptions:
    """Tokens of a draft: at first, and the bounds. fixed: no rule changes it."""

    start: int = 8
    least: int = 0
    most: int = MOST_DRAFTED
    fixed: bool = False


class DraftLength:
    """Grows by 2 while more than 75 % of the tested tokens were accepted of late, shrinks by 2 below 50 %.

    At length 0 nothing is tested; `retry` lets it begin again with the shortest draft.
    """

    def __init__(self, options: LengthOptions) -> None:
        self.value = options.start
        self._options = options
        self._rounds: deque[tuple[int, int]] = deque(maxlen=ROUNDS)

    def add(self, accepted: int, rejected: bool) -> None:
        """Learn from one verification: tokens accepted, and whether one was rejected then."""
        if accepted or rejected:
            self._rounds.append((accepted, accepted + rejected))
        if self._options.fixed or not self._rounds:
            return
        rate = sum(hits for hits, _ in self._rounds) / sum(tested for _, tested in self._rounds)
        change = STEP if rate > GROW_ABOVE else -STEP if rate < SHRINK_BELOW else 0
        self.value = min(self._options.most, max(self._options.least, self.value + change))

    def retry(self) -> None:
        """Leave length 0 for one verification."""
        self.value = max(self.value, min(STEP, self._options.most))
