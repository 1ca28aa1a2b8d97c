"""Texts decoded side by side, a slice of each in turn: what disturbs the machine meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import ceil
from typing import NamedTuple

from strata.core import Request
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.engine.speculative.figures import SpeculationFigures

SLICE = 0.0025
"""Seconds that the tokens of a slice take without drafts, or a token's where that is longer.

On a shared guest with steps of 0.35 ms, equal engines differed in a round of 256 tokens by 26 % (standard
deviation) one after the other, by 9 to 20 % in slices of 10 ms, by 5 % in these and by 4 % step by step. The
first step of a slice takes 20 us more, which all pay. A step of one row takes 15 % more right after one of 5
or 9: step by step, others would pay for that.
"""


class Step(NamedTuple):
    """One of a text. tokens: that it brought; rows: that it computed. drafting: seconds of a proposer that is
    not free."""

    seconds: float
    tokens: int
    rows: int = 1
    drafting: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds of all but the proposer."""
        return self.seconds - self.drafting


class Decoding:
    """One request, whose prompt is computed at once, on an engine that is idle and does nothing else.

    steps: those behind the first token.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request = request
        self.steps: list[Step] = []
        self._engine, self._clock = engine, clock
        speculator = engine.speculator
        self._figures = SpeculationFigures() if speculator is None else speculator.figures
        self._free = speculator is None or speculator.proposer.free
        engine.add(request, sampler)
        while engine.busy and not engine.step():
            pass
        self._check()

    @property
    def tokens(self) -> int:
        """Behind the first one."""
        return len(self.request.generated) - 1

    def advance(self, until: int | None = None) -> None:
        """Decode to the end, or until there are so many tokens; the last step may bring more."""
        while self._engine.busy and (until is None or self.tokens < until):
            self.steps.append(self._step())
        self._check()

    def _step(self) -> Step:
        figures, known = self._figures, self.tokens
        proposed, drafting = figures.proposed, figures.draft_seconds
        begin = self._clock()
        self._engine.step()
        seconds = self._clock() - begin
        drafting = 0.0 if self._free else figures.draft_seconds - drafting
        return Step(seconds, self.tokens - known, 1 + figures.proposed - proposed, drafting)

    def _check(self) -> None:
        if self.request.error is not None:
            raise self.request.error


class Turns:
    """Who decodes when. Slices end at the same token for all, however long that takes them: each text's
    tokens are decoded by all within one turn, and nobody has to be compared with what was or came later.
    """

    def __init__(self, count: int) -> None:
        self._orders = cycle(orders(count))
        self._pace = 0.0

    def order(self) -> Sequence[int]:
        """Of the next turn."""
        return next(self._orders)

    def take(self, decodings: Sequence[Decoding], plain: Decoding) -> None:
        """Until all have ended. plain: says how many tokens a slice is."""
        until = 0
        while not all(each.request.finish_reason for each in decodings):
            until += ceil(SLICE / self._pace) if self._pace else 1
            for place in self.order():
                decodings[place].advance(until)
            self._pace = sum(step.seconds for step in plain.steps) / plain.tokens


def orders(count: int) -> Iterator[list[int]]:
    """Turns in which everybody is everywhere, and follows everybody else, equally often (Williams, 1949).

    From four on, nobody is the last of one and the first of the next: nobody's slice is twice as long.
    """
    first = [-(step // 2) % count if step % 2 == 0 else step // 2 + 1 for step in range(count)]
    for design in [first] if count % 2 == 0 else [first, first[::-1]]:
        for shift in range(count):
            yield [(place + shift) % count for place in design]
