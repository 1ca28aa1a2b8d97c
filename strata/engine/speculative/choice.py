"""How many tokens of each draft to verify, so that tokens per second are the most that can be expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_GAIN = 1.01
"""Expected gain below which a step stays plain: times are not known better than that."""
STAKE = 0.5
"""Of what may still be lost, in one step. All of it at once would let one or two bad drafts end speculation
for the rest of the window, however well it goes."""


@dataclass(frozen=True)
class Option:
    """One request of the step: tokens it could verify, and how likely each is accepted after the others.

    left: plain steps that it may still lose.
    """

    most: int
    rate: float
    left: float


def choose(
    options: Sequence[Option],
    expected: Callable[[int, int], float],
    worst: Callable[[int, int], float],
    plain: float,
    limit: int | None = None,
) -> list[int]:
    """Draft lengths by request, 0 included.

    expected, worst: seconds of the step with so many draft rows in all, of which one request has so many at
    most (what a draft model takes depends on the longest draft). plain: of a step without drafts. A draft's
    next token is worth the chance that it is reached and accepted; the most valuable ones come first, which
    for every number of rows is the best that can be done with it. A step that could lose more than the
    poorest request may still lose is out of the question; what it is expected to lose if nothing is accepted
    may only be a part of that (STAKE). limit: rows in all, at most.
    """
    gains = sorted(_gains(options), reverse=True)[:limit]
    left = min(option.left for option in options)
    allowed, prudent = plain * (1 + left), plain * (1 + STAKE * left)
    lengths = [0] * len(options)
    best, best_rate = list(lengths), LEAST_GAIN * len(options) / plain
    tokens = float(len(options))
    for rows, (gain, request) in enumerate(gains, 1):
        lengths[request] += 1
        tokens += gain
        longest = max(lengths)
        seconds = expected(rows, longest)
        if seconds > prudent:
            break
        rate = tokens / seconds
        if rate > best_rate and worst(rows, longest) <= allowed:
            best, best_rate = list(lengths), rate
    return best


def _gains(options: Sequence[Option]) -> list[tuple[float, int]]:
    """The value of every token that could be verified, with its request."""
    return [
        (option.rate**place, index)
        for index, option in enumerate(options)
        for place in range(1, option.most + 1)
    ]
