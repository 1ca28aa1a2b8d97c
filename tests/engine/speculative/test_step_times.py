"""What steps are thought to take, from few and disturbed times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Matches, decode

from strata.engine.speculative.choice import choose
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.step_times import HOPE, KEPT, LEAST_GAIN, PLAIN_TIMES, StepTable, StepTimes


def table(times: dict[int, Sequence[float]], plain: float = 1.0) -> StepTable:
    """Of one request, with plain steps and these times by rows."""
    made = StepTable(1, lambda rows: 1.0 + 0.1 * rows)
    for _ in range(PLAIN_TIMES):
        made.add(1, plain)
    for rows, seconds in times.items():
        for each in seconds:
            made.add(rows, each)
    return made


def test_what_was_measured_holds_for_longer_contexts_until_it_is_measured_there() -> None:
    times = StepTimes(lambda rows, **_: 1.0)
    short = times.table(1, 100)
    assert not short.known
    for rows, seconds in ((1, 2.0), (1, 2.0), (1, 2.0), (5, 4.0)):
        short.add(rows, seconds)
    longer = times.table(1, 200)
    assert longer.known and longer.plain == 2.0 and longer.expected(5) == 2.0
    longer.add(1, 3.0)
    assert longer.plain == 2.0  # one time may be a disturbed one
    longer.add(1, 3.0)
    longer.add(1, 3.0)
    assert longer.plain == 3.0 and longer.expected(5) == 2.0
    assert not times.table(2, 200).known


@pytest.mark.parametrize("disturbed", [1, 2, 3])
def test_disturbances_change_nothing(disturbed: int) -> None:
    """The fastest quarter counts: most of the times may be far too long."""
    times = [1.5] * (KEPT // 4 + 1) + [30.0] * disturbed
    assert table({4: times}).expected(4) == 1.5


def test_more_rows_take_no_less() -> None:
    """A time of 5 rows that is above that of 9 was disturbed."""
    assert table({5: [1.9], 9: [1.6]}).expected(5) == 1.6


def test_one_time_far_above_its_neighbours_is_not_believed() -> None:
    """Thrice measured, it is."""
    assert table({2: [1.1], 3: [9.0]}).expected(3) == pytest.approx(1.1 + HOPE * 0.1)
    assert table({2: [1.1] * 3, 3: [9.0] * 3}).expected(3) == 9.0


def test_what_was_measured_seldom_is_forgotten_in_doubt() -> None:
    made = table({2: [1.2] * 3, 3: [1.4]})
    assert made.expected(3) == 1.4
    made.doubt()
    assert made.expected(2) == 1.2 and made.expected(3) == pytest.approx(1.2 * 1.3 / 1.2)


@given(
    st.lists(st.floats(0.0, 0.6), min_size=32, max_size=32),
    st.lists(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=16), min_size=1, max_size=2),
    st.floats(0.0, 0.5),
)
def test_no_other_lengths_promise_more(
    increments: list[float], rates: list[list[float]], token: float
) -> None:
    """Beside every pair of lengths, where nothing forbids any, and drafts of two cost nothing."""
    count = len(rates)
    token = token if count == 1 else 0.0
    made, total = StepTable(count, lambda rows: 1.0), 1.0
    for rows, increment in enumerate([0.0, *increments], count):
        for _ in range(PLAIN_TIMES):
            made.add(rows, total + increment)
        total += increment
    chances = [list(accumulate(each, mul)) for each in rates]

    def rate(lengths: Sequence[int]) -> float:
        tokens = count + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return tokens / (made.expected(count + sum(lengths)) + token * max(lengths))

    found = choose(chances, 1e9, made, token)
    best = max(rate(lengths) for lengths in product(*(range(len(each) + 1) for each in chances)))
    assert rate(found.lengths) >= best / LEAST_GAIN - 1e-9
    assert found.rate == pytest.approx(rate(found.lengths))


class Slow(Matches):
    """Takes a twentieth of a step to say nothing useful, and counts how often."""

    asked = 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.asked += 1
        self.now += 0.05
        return super().propose(asks)


def test_a_proposer_that_is_never_right_is_asked_less_often() -> None:
    """So that it costs about 1 % of the time."""
    drafts = Slow(lambda *_: False)
    steps, _ = decode(drafts, lambda rows: 1 + 0.3 * (rows - 1), lambda rows: 1 + 0.3 * rows, 600)
    assert drafts.asked < 200
    assert steps[-1].end - steps[-200].begin < 200 * 1.015


def test_it_is_asked_often_again_when_it_is_right() -> None:
    drafts = Slow(lambda _, position: position > 300)
    steps, _ = decode(drafts, lambda rows: 1 + 0.1 * (rows - 1), lambda rows: 1 + 0.1 * rows, 500)
    assert sum(step.tokens["0"] for step in steps[-100:]) > 800


def test_what_is_doubted_still_bounds() -> None:
    """A step that took 1.4 plain ones once, disturbed or not, never takes more, with more context either."""
    times = StepTimes(lambda rows, **_: 1 + 0.05 * rows)
    table = times.table(1, 40)
    for seconds in (1.0, 1.0, 1.0):
        table.add(1, seconds)
    assert table.worst(2) == 2.0
    table.add(3, 1.4)
    assert table.worst(2) == table.worst(3) == 1.4
    table.doubt()
    assert table.expected(3) < 1.2 and table.worst(2) == table.worst(3) == 1.4
    assert table.worst(4) == 4.0 and times.table(1, 80).worst(3) == 1.4
