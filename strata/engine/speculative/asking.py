"""How often it is asked whether drafts would pay: that takes time, too, whatever comes of it."""

from __future__ import annotations

from collections import deque

from strata.engine.speculative.step_times import KEPT, usual

SHARE, IDLE, LONGEST = 0.01, 0.5, 8
"""Of the time of plain decoding, for asking that comes to nothing, once it has taken IDLE plain steps since a
draft: then some steps in a row are passed over, LONGEST at most."""
DEAR = 0.1
"""Plain steps from which on there must be a reason to ask. It takes 0.02 of a step of 5 ms, and 0.3 to 0.6 of
the demo's 0.25 ms: what it reads of Python is in no near cache any more."""
WATCHED_EVERY, CLOSELY = 8, 3
"""Where there must be one: steps in a row without even a glance at the text, and while that agrees."""
POOR = 8
"""Steps without asking when it could not be afforded, or not even the shortest draft."""


class Asking:
    """Measures what asking takes, in Python, of the engine's thread; a draft model's work is not in it.

    seconds, took: that it takes, in seconds and in plain steps. unpaid: seconds of first times, which take
    longer than any other and are charged when it is known what those take. wanted: how far a proposal must be
    trusted, as a glance shows, to be a reason for asking.
    """

    __slots__ = (
        "_drafted",
        "_due",
        "_idle",
        "_least",
        "_most",
        "_pause",
        "_plain",
        "seconds",
        "took",
        "unpaid",
        "wanted",
    )

    def __init__(self, least: int, most: int) -> None:
        """least: that is wanted at first; most: whatever came to nothing."""
        self.seconds = self.took = self.unpaid = 0.0
        self._least, self._most = least, most
        self._due, self._pause, self._idle = 0, 0, 0.0
        self.wanted = least
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._drafted: deque[float] = deque(maxlen=KEPT)

    @property
    def dear(self) -> bool:
        """Whether there must be a reason."""
        return self.took > DEAR

    def measured(self, seconds: float, drafted: bool) -> float:
        """Of a step; what of it is to be charged now. Like of steps' times, the fastest quarter counts."""
        times = self._drafted if drafted else self._plain
        times.append(seconds)
        if len(times) == 1:
            self.unpaid += seconds
            return 0.0
        self.seconds = usual(times)
        if len(times) > 2:
            return self.seconds
        self.unpaid = max(0.0, self.unpaid - times[0])
        return 2 * self.seconds

    def asked(self, plain: float, idle: bool) -> None:
        """Of a step; plain ones take so many seconds. idle: nothing came of it, nor is there more to come."""
        self.took = self.seconds / plain
        self._due = int(self.took / SHARE) if idle else 0
        self._idle = self._idle + self.took if idle else 0.0
        self._pause = min(LONGEST, self._due) if self._idle > IDLE else 0
        self.wanted = min(self._most, self.wanted + 1) if idle else self._least

    def glanced(self, trust: int) -> None:
        """So far could a proposal be trusted: where a text does not repeat, what is wanted begins anew."""
        if trust < self._least:
            self.wanted = self._least

    def rest(self, trust: int) -> int:
        """Steps to go without, after a glance that is no reason to ask."""
        return WATCHED_EVERY if trust < self._least else CLOSELY

    def pause(self) -> int:
        """Steps to go without where no reason is needed."""
        found, self._pause = self._pause, 0
        return found

    def until_due(self) -> int:
        """Steps to go without where only asking says whether there is a reason."""
        if self._due <= 0:
            return 0
        self._due -= WATCHED_EVERY
        return WATCHED_EVERY
