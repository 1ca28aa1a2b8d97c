"""How often it is asked whether drafts would pay: that takes time, too, whatever comes of it."""

from __future__ import annotations

from collections import deque

from strata.engine.speculative.step_times import KEPT

SHARE = 0.01
"""Of the time of plain decoding, for asking that comes to nothing. Where a step takes 5 ms it does not get
there. The demo's takes 0.3 ms, and asking 0.1 ms: what it reads of Python is in no near cache any more."""
WATCHED_EVERY = 6
"""Where it does: steps in a row without even a glance at the text."""
AGREED = 4
"""Tokens in a row that went on as they did before, as a glance shows: a reason to ask. Where nothing came of
it, twice as many are."""
POOR = 8
"""Steps without asking when it could not be afforded, or not even the shortest draft."""


class Asking:
    """Measures what asking takes, in Python, of the engine's thread; a draft model's work is not in it.

    seconds, took: that it takes, in seconds and in plain steps.
    """

    __slots__ = ("_drafted", "_due", "_plain", "_wanted", "seconds", "took")

    def __init__(self) -> None:
        self.seconds = self.took = 0.0
        self._due, self._wanted = 0, AGREED
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._drafted: deque[float] = deque(maxlen=KEPT)

    @property
    def dear(self) -> bool:
        """Whether there must be a reason."""
        return self.took > SHARE

    def measured(self, seconds: float, drafted: bool) -> None:
        """Of a step. Like steps' times, the fastest quarter of the latest says what it takes."""
        times = self._drafted if drafted else self._plain
        times.append(seconds)
        self.seconds = sorted(times)[len(times) // 4]

    def asked(self, took: float, idle: bool) -> None:
        """It took so many plain steps. idle: nothing came of it, neither a draft nor that one can be made."""
        self.took = took
        self._due = int(took / SHARE) if idle else 0
        if not idle:
            self._wanted = AGREED

    def rest(self, agreed: int | None) -> int:
        """Steps to go without, after so many tokens in a row that agreed; None: nothing to propose."""
        if agreed is not None and agreed >= self._wanted:
            self._wanted = 2 * agreed
            return 0
        if agreed is None or agreed < AGREED:
            self._wanted = AGREED
        if agreed is not None and self._due <= 0:
            return 0
        self._due -= WATCHED_EVERY
        return WATCHED_EVERY
