"""What is charged for a text that a draft model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from simulated import ENDLESS, Drafts, Matches, decode, measured_cost, speed

from strata.core import Request, SamplingParams
from strata.engine.sampler import Sampler
from strata.engine.scheduler import Work
from strata.engine.speculative.drafting import Drafting
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.step_times import StepTimes


def test_what_is_not_read_costs_nothing() -> None:
    """However much the draft model lost before: its debts are no request's that has nothing left."""
    drafts = Drafts(lambda request, position: True, seconds=0.1, reading=0.1)
    drafting = Drafting(drafts, lambda: drafts.now, 16, "request")
    request = Request("0", [0] * 40, ENDLESS)
    ask = Ask(request, 1, Sampler(ENDLESS, 2))
    table = StepTimes(lambda rows, **at: 1.0).table(1, 40)
    for _ in range(3):
        table.add(1, 1.0)
    drafting.costs.read(ask, 1)
    drafting.costs.settle()
    drafting.win(-5.0)
    assert drafting._caught_up([ask], [1], table, -0.5) == [0]
    assert drafting.won == -5.0 and drafting.costs.spent == 0.0


@dataclass
class Followed(Drafts):
    """Keeps up with the text, which takes a thousandth of a step."""

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None:
        self.now += 0.001


@dataclass
class Slow(Matches):
    """Takes a twentieth of a step of `watch` to look, and counts how often it does."""

    watch: Drafts | None = None
    looks: int = 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        assert self.watch is not None
        self.watch.now += 0.05
        self.looks += 1
        return super().propose(asks)


def test_what_stands_in_for_a_draft_rests_too() -> None:
    """A model of half a millisecond: looking for matches at every step would take a twentieth of the time."""
    drafts = Followed(lambda request, position: False, seconds=2.0, reading=1.0)
    spare = Slow(lambda request, position: False, watch=drafts)
    decode(drafts, measured_cost("demo"), measured_cost("demo"), 512, spare=spare)
    assert 10 < spare.looks < 150


@dataclass
class Fetched(Drafts):
    """Whatever it reads at once takes as long as a token, and a thousandth of a step for each. What it
    computes first takes `cold` steps more."""

    cold: float = 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self._fetch()
        return super().propose(asks)

    def read(self, request: Request, count: int) -> None:
        self._fetch()
        super().read(request, count)
        self.now += self.seconds

    def _fetch(self) -> None:
        self.now += self.cold
        self.cold = 0.0


@pytest.mark.parametrize("cold", [0.0, 0.3])
def test_a_first_request_of_few_tokens_has_drafts(cold: float) -> None:
    """Its prompt is read although a token that is read alone takes so long that most of the answer would be
    over; and a model that was slow once is asked again."""
    drafts = Fetched(lambda request, position: True, seconds=0.05, reading=0.001, cold=cold)
    few = SamplingParams(temperature=0.0, max_tokens=200)
    steps, _ = decode(drafts, measured_cost("random MoE"), flat, 60, prompt=300, sampling=few)
    assert speed(steps) > 2.0


def flat(rows: int) -> float:
    return 1.0
