"""What is charged for a text that a draft model reads."""

from __future__ import annotations

from simulated import ENDLESS, Drafts

from strata.core import Request
from strata.engine.sampler import Sampler
from strata.engine.speculative.costs import ByCosts
from strata.engine.speculative.draft_costs import DraftCosts
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.proposer import Ask


def test_what_is_not_read_costs_nothing() -> None:
    """However much the draft model lost before: its debts are no request's that has nothing left."""
    drafts = Drafts(lambda request, position: True, seconds=0.1, reading=0.1)
    policy = ByCosts(drafts, LengthOptions(), lambda rows, **at: 1.0, lambda: drafts.now)
    costs = policy._draft
    assert isinstance(costs, DraftCosts)
    request = Request("0", [0] * 40, ENDLESS)
    ask = Ask(request, 1, Sampler(ENDLESS, 2))
    table = policy._times.table(1, 40)
    for _ in range(3):
        table.add(1, 1.0)
    costs.read(ask, 1)
    costs.settle()
    policy._won = -5.0
    assert policy._caught_up([ask], [1], table, -0.5) == [0]
    assert policy._won == -5.0 and costs.spent == 0.0
