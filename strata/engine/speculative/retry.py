"""When a proposer that costs something and was given up is asked again."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 512
"""Steps without a draft of it that was tested, at most; every failure doubles them."""

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

    def tested(self, hit: bool) -> None:
        """Its draft was right, at first at least, or wrong at once."""
        self.untested = 0
        self.after = self.first if hit else min(LAST, 2 * max(1, self.after))
