"""When a proposer that costs something and was given up is asked again."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 512
"""Steps without a draft of it that was tested, at most."""
LEAST_GROWTH, DEAR, MOST_GROWTH = 1.15, 2.0, 2.0
"""Every failure makes them so many times as many: by LEAST_GROWTH, and DEAR more for each plain step that a
token takes. Right and wrong guesses come in runs, and only asking says that they are right again: of one
token, which is compared and need not be verified (`test_near_best.py`)."""

LATER = 16
"""Steps until the next look, when it was to be tried and could not be afforded."""


@dataclass(slots=True)
class Retry:
    """Of one request. untested: steps since its last draft was tested; after: how many let it be tried again
    (`first`, when the last one was right)."""

    first: int
    after: int
    untested: int = 0

    @property
    def due(self) -> bool:
        """Whether it is to be tried."""
        return self.untested >= self.after

    def waited(self) -> None:
        """A step said nothing about it."""
        self.untested += 1

    def later(self) -> None:
        """It could not be tried."""
        self.after = max(self.after, self.untested + LATER)

    def tested(self, hit: bool, token: float = MOST_GROWTH) -> None:
        """Its draft was right, at first at least, or wrong at once. token: plain steps that one takes."""
        self.untested = 0
        if hit:
            self.after = self.first
        else:
            growth = min(MOST_GROWTH, LEAST_GROWTH + DEAR * token)
            self.after = min(LAST, max(self.after + 1, int(growth * self.after)))
