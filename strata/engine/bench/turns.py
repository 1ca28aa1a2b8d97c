"""Texts decoded side by side, a slice of each in turn: what disturbs the machine meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import ceil

from strata.core import Request
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler

SLICE = 0.010
"""Seconds that the tokens of a slice take without drafts, or a token's where that is longer."""


class Decoding:
    """One request, whose prompt is computed at once, on an engine that is idle and does nothing else.

    steps: seconds and tokens of each, behind the first token.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request = request
        self.steps: list[tuple[float, int]] = []
        self.seconds = 0.0
        self._engine, self._clock = engine, clock
        engine.add(request, sampler)
        while engine.busy and not engine.step():
            pass

    @property
    def tokens(self) -> int:
        """Behind the first one."""
        return len(self.request.generated) - 1

    def advance(self, until: int | None = None) -> None:
        """Decode to the end, or until there are so many tokens; the last step may bring more."""
        engine, begin, known = self._engine, self._clock(), self.tokens
        while engine.busy and (until is None or known < until):
            engine.step()
            end, now = self._clock(), self.tokens
            self.steps.append((end - begin, now - known))
            self.seconds += end - begin
            begin, known = end, now
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
            self._pace = plain.seconds / plain.tokens


def orders(count: int) -> Iterator[list[int]]:
    """Turns in which everybody is everywhere, and follows everybody else, equally often (Williams, 1949).

    From four on, nobody is the last of one and the first of the next: nobody's slice is twice as long.
    """
    first = [-(step // 2) % count if step % 2 == 0 else step // 2 + 1 for step in range(count)]
    for design in [first] if count % 2 == 0 else [first, first[::-1]]:
        for shift in range(count):
            yield [(place + shift) % count for place in design]
