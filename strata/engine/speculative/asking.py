"""How often it is asked whether drafts would pay: that takes time, too, whatever comes of it."""

from __future__ import annotations

from collections import deque

from strata.engine.speculative.step_times import KEPT

SHARE = 0.01
"""Of the time of plain decoding, for asking that comes to nothing, unless there is a reason to ask. Where a
step takes 5 ms it does not get there; the demo, whose steps take 0.35 ms, asks every twentieth time."""
POOR = 8
"""Steps without asking when not even that can be afforded."""


class Asking:
    """Measures what asking takes, in Python, of the engine's thread; a draft model's work is not in it.

    rest: steps in a row that are to go without. seconds, took: what asking takes, in seconds and in plain
    steps.
    """

    __slots__ = ("_drafted", "_plain", "rest", "seconds", "took")

    def __init__(self) -> None:
        self.rest = 0
        self.seconds = self.took = 0.0
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._drafted: deque[float] = deque(maxlen=KEPT)

    def measured(self, seconds: float, drafted: bool) -> None:
        """Of a step. Like steps' times, the fastest quarter of the latest says what it takes."""
        times = self._drafted if drafted else self._plain
        times.append(seconds)
        self.seconds = sorted(times)[len(times) // 4]

    def came_to_nothing(self) -> None:
        """There was no draft."""
        self.rest = int(self.took / SHARE)
