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

    E.g. chances [[0.8, 0.3]], where steps of two and three rows take 1.4 and 1.6 plain ones: a draft of one
    token promises 1.8 / 1.4 = 1.29 tokens per plain step, of two 2.1 / 1.6 = 1.31, which is chosen.
    """
    requests = len(chances)
    coming = sum([chance for each in chances for chance in each])
    if coming:
        first = max([each[0] for each in chances if each])
        if pays(requests, coming, first, left, steps.expected(requests + 1) + token):
            return _best(chances, first, coming, left, steps, token)
    return Choice([0] * requests, float(requests))


def pays(requests: int, coming: float, first: float, left: float, taken: float) -> bool:
    """Whether drafts may be worth it, when a step with one drafted token takes `taken` plain ones: that can
    be afforded (`stake`), and would gain if it brought all `coming` tokens that may be accepted in any step.
    """
    return taken <= 1 + stake(left, first, taken - 1) and requests + coming > LEAST_GAIN * requests * taken


def _best(
    chances: Sequence[Sequence[float]], first: float, coming: float, left: float, steps: Steps, token: float
) -> Choice:
    """`choose` where something may pay.

    The most valuable tokens come first, which for every number of rows is the best that can be done with it.
    """
    requests = len(chances)
    prudent = 1 + stake(left, first, steps.expected(requests + 1) + token - 1)
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
            break  # too dear, or not even all that may yet come would make it better
        tokens += gain
        coming -= gain
        if tokens > best_rate * taken:
            if steps.worst(requests + rows) + longest * token > 1 + left:
                break
            best, best_rate = rows, tokens / taken
    lengths = [0] * requests
    for _, request in gains[:best]:
        lengths[request] += 1
    return Choice(lengths, best_rate if best else float(requests))


def stake(left: float, first: float, row: float) -> float:
    """Plain steps that may be lost now of the `left` ones that may be lost at all.

    first: the chance that the best draft's first token is right, so that it is no loss. row: what the
    shortest draft takes. When not even that can be paid for, speculation is over for a while, however good
    drafts become. So one and a quarter of those are kept back, with doubtful drafts more; the last is for
    one that is nearly sure. The numbers are what gained most in simulations of texts with runs of right and
    wrong drafts (`test_near_best.py`), and on texts that models wrote.
    """
    return max(first**2 * (left - 1.25 * row), min(first**2 * left, row))
