"""A clock for tests: it knows only how often it was asked."""

from __future__ import annotations


class TickingClock:
    """Goes on by a second whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
