"""How many tokens of each draft to verify, so that tokens per second are the most that can be expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.engine.speculative.step_times import LEAST_GAIN

Steps = Callable[[int, int], float]
"""Plain steps that a step takes with so many draft rows in all, of which one request has so many at most
(what a draft model takes depends on the longest draft)."""


@dataclass(frozen=True)
class Option:
    """One request of the step.

    chances: for every token that it could verify, how likely it is reached and accepted; falling. left: plain
    steps that it may still lose.
    """

    chances: Sequence[float]
    left: float


def choose(options: Sequence[Option], expected: Steps, worst: Steps) -> list[int]:
    """Draft lengths by request, 0 included.

    The most valuable tokens come first, which for every number of rows is the best that can be done with it.
    A step that could lose more than the poorest request may still lose is out of the question; what it is
    expected to lose if nothing is accepted may only be a part of that (`stake`).
    """
    gains = sorted(
        ((chance, index) for index, option in enumerate(options) for chance in option.chances), reverse=True
    )
    best, best_rate = [0] * len(options), LEAST_GAIN * len(options)
    if not gains:
        return best
    left = min(option.left for option in options)
    first = min(option.chances[0] for option in options if option.chances)
    prudent = 1 + stake(left, first, expected(1, 1) - 1)
    lengths, longest = list(best), 0
    tokens, coming = float(len(options)), sum(chance for chance, _ in gains)
    for rows, (gain, request) in enumerate(gains, 1):
        lengths[request] += 1
        longest = max(longest, lengths[request])
        steps = expected(rows, longest)
        if steps > prudent or tokens + coming <= best_rate * steps:
            break
        tokens += gain
        coming -= gain
        if tokens > best_rate * steps and worst(rows, longest) <= 1 + left:
            best, best_rate = list(lengths), tokens / steps
    return best


def stake(left: float, first: float, row: float) -> float:
    """Plain steps that may be lost now of the `left` ones that may be lost at all.

    first: the chance that a draft's first token is right, so that it is no loss. row: what the shortest draft
    takes. A success brings back all that was lost before, but when not even the shortest draft can be paid
    for, speculation is over for the rest of the window, however good drafts become. So one of those is kept
    back, and with doubtful drafts more. The square is what gained most in simulations of texts with runs of
    right and wrong drafts (tests/engine/speculative/test_near_best.py); half of what is left, whatever the
    chances, gained up to 40 % less.
    """
    return max(first**2 * (left - row), min(first * left, row))
