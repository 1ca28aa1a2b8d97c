"""How many tokens of each draft to verify, so that tokens per second are the most that can be expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from strata.engine.speculative.step_times import LEAST_GAIN


class Steps(Protocol):
    """What steps take, in plain ones (`StepTable`)."""

    def expected(self, rows: int) -> float:
        """A step with so many rows in all."""
        ...

    def worst(self, rows: int) -> float:
        """The same at most."""
        ...


class Choice(NamedTuple):
    """Draft lengths by request, and the tokens per plain step of all of them that they promise."""

    lengths: list[int]
    rate: float


def choose(chances: Sequence[Sequence[float]], left: float, steps: Steps, token: float = 0.0) -> Choice:
    """The lengths that promise most, 0 included.

    chances: of each request, for every token that it could verify, how likely it is reached and accepted;
    falling. left: plain steps that the step may lose, if nothing is accepted. token: plain steps that the
    proposer takes for a token of all drafts together.

    The most valuable tokens come first, which for every number of rows is the best that can be done with it.
    """
    requests = len(chances)
    none = Choice([0] * requests, float(requests))
    coming = sum([chance for each in chances for chance in each])
    if not coming:
        return none
    first = max([each[0] for each in chances if each])
    taken = steps.expected(requests + 1) + token
    prudent = 1 + stake(left, first, taken - 1)
    if taken > prudent or requests + coming <= LEAST_GAIN * requests * taken:
        return none  # as the first of the rows below would say
    gains = [(chance, index) for index, each in enumerate(chances) for chance in each]
    if requests > 1:
        gains.sort(reverse=True)
    best, best_rate = 0, LEAST_GAIN * requests
    tokens = float(requests)
    lengths, longest = [0] * requests, 0
    for rows, (gain, request) in enumerate(gains, 1):
        lengths[request] += 1
        if lengths[request] > longest:
            longest += 1
        taken = steps.expected(requests + rows) + longest * token
        if taken > prudent or tokens + coming <= best_rate * taken:
            break
        tokens += gain
        coming -= gain
        if tokens > best_rate * taken:
            if steps.worst(requests + rows) + longest * token > 1 + left:
                break
            best, best_rate = rows, tokens / taken
    if not best:
        return none
    lengths = [0] * requests
    for _, request in gains[:best]:
        lengths[request] += 1
    return Choice(lengths, best_rate)


def stake(left: float, first: float, row: float) -> float:
    """Plain steps that may be lost now of the `left` ones that may be lost at all.

    first: the chance that the best draft's first token is right, so that it is no loss. row: what the
    shortest draft takes. When not even that can be paid for, speculation is over for a while, however good
    drafts become. So one and a quarter of those are kept back, with doubtful drafts more; the last is for
    one that is nearly sure. The numbers are what gained most in simulations of texts with runs of right and
    wrong drafts (`test_near_best.py`), and on texts that models wrote.
    """
    return max(first**2 * (left - 1.25 * row), min(first**2 * left, row))
