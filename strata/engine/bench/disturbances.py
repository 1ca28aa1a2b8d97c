"""What other programs took from single steps, left out of their time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from statistics import median

from strata.engine.bench.turns import Step

DISTURBED = 1.5
"""Times the usual: so long a step computes at most, if nothing came in between. On a shared guest 9 to 14 %
of steps of 0.35 ms took longer, up to 40 times as long. Two equal engines, whose rounds of 256 tokens
differed by 5 % (standard deviation) in turns, differed by 1 % when steps were cut to this."""


def undisturbed(rounds: Sequence[Sequence[Sequence[Step]]]) -> list[list[list[float]]]:
    """Seconds of each step by round and text: the first text of a round is plain, others took turns with it.

    What is not a draft model's is DISTURBED times the usual at most: the median of steps of as many rows in
    all texts and rounds, in plain steps, times the round's plain step. Fewer rows never take more. The draft
    model's time is its own: it may read a whole text at once.
    """
    units = [median(step.computing for step in texts[0]) for texts in rounds]
    usual = _usual(rounds, units)
    return [
        [[_cut(step, usual[step.rows] * unit) for step in steps] for steps in texts]
        for texts, unit in zip(rounds, units, strict=True)
    ]


def _cut(step: Step, usual: float) -> float:
    return min(step.computing, DISTURBED * usual) + step.drafting


def _usual(rounds: Sequence[Sequence[Sequence[Step]]], units: Sequence[float]) -> dict[int, float]:
    """Plain steps that one takes, by its rows."""
    taken: dict[int, list[float]] = defaultdict(list)
    for texts, unit in zip(rounds, units, strict=True):
        for step in (step for steps in texts for step in steps):
            taken[step.rows].append(step.computing / unit)
    found, least = {}, inf
    for rows in sorted(taken, reverse=True):
        least = found[rows] = min(least, median(taken[rows]))
    return found
