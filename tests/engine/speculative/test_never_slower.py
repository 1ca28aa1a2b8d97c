"""The promise: a request has at least 0.97 of plain decoding's speed, a window of it 0.94 (virtual time)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Cost, Drafts, Matches, Step, Sure, coins, decode, measured_cost, slowest_window, speed

from strata.engine.speculative.draft_costs import DRAFT_AT_MOST
from strata.engine.speculative.ledger import BUDGET, LOSS, PROMISE, WINDOW, WINDOW_FLOOR, Ledger, Promise
from strata.engine.speculative.step_times import LEAST_ROW

DEARER = 2
"""Times what rows before it took on average: a row takes no more, as `StepTable` reckons."""


def costs(parts: list[float], requests: int) -> Cost:
    """Seconds by rows. A plain step takes 1, of one row for each request. Each row more takes a part of the
    most that a row may take: DEARER times what those before it took on average, a request's share of a plain
    step at most."""
    table, taken = [1.0] * requests, 0.0
    for rows, part in enumerate(parts, 1):
        most = 1 / requests if rows == 1 else min(1 / requests, DEARER * max(LEAST_ROW, taken / (rows - 1)))
        taken += part * most
        table.append(1.0 + taken)
    return lambda rows: table[rows - 1]


INCREMENTS = st.lists(st.floats(0.0, 1.0), min_size=64, max_size=64)
SEGMENTS = st.lists(st.tuples(st.integers(1, 80), st.floats(0.0, 1.0)), min_size=1, max_size=8)


def by_segments(segments: list[tuple[int, float]], seed: int) -> list[bool]:
    """Whether each position's draft is right: stretches of a text with an acceptance each."""
    chosen = random.Random(seed)
    found = [chosen.random() < rate for length, rate in segments for _ in range(length)]
    return found * (6000 // len(found) + 1)


def slowest_beginning(steps: Sequence[Step], plain: float, request: str, width: int = 64) -> float:
    """The lowest speed of a whole request at any of its steps from `width` on, by plain decoding's."""
    tokens = list(accumulate(step.tokens[request] for step in steps))
    return min(tokens[i] * plain / (steps[i].end - steps[0].begin) for i in range(width - 1, len(steps)))


@settings(max_examples=40, deadline=None)
@given(
    INCREMENTS,
    SEGMENTS,
    st.integers(0, 999),
    st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    st.integers(1, 3),
    st.sampled_from([Matches, Drafts, Sure]),
    st.sampled_from(["request", "window"]),
    st.sampled_from([0.0, 0.005, 0.05, 0.25]),
)
def test_no_window_is_slower_than_promised(
    increments: list[float],
    segments: list[tuple[int, float]],
    seed: int,
    drafting: float,
    requests: int,
    kind: type[Drafts],
    promise: Promise,
    thinking: float,
) -> None:
    """Whatever steps cost, whatever is accepted when: also when drafts are right until they are trusted,
    and whatever they say of themselves. thinking: plain steps that asking takes, whatever comes of it."""
    texts = [by_segments(segments, seed + i) for i in range(requests)]
    drafts = kind(lambda name, position: texts[int(name)][position], 0.0 if kind is Matches else drafting)
    if isinstance(drafts, Sure):
        chosen = random.Random(seed)
        drafts.chances = [chosen.choice((0.1, 0.4, 0.8, 0.999)) for _ in range(97)]
    cost = costs(increments, requests)
    shape: Cost = lambda rows: 1 + 0.05 * rows  # noqa: E731
    steps, _ = decode(drafts, cost, shape, 260, requests, promise=promise, thinking=thinking)
    least = PROMISE if promise == "window" else WINDOW_FLOOR
    for name in map(str, range(requests)):
        assert slowest_window(steps, cost(requests), name) >= least - 1e-9
        assert slowest_beginning(steps, cost(requests), name) >= 0.97 - 1e-9


def test_an_adversary_who_waits_for_trust() -> None:
    """Right for 100 tokens, wrong for 10, again and again: the losses of a window stay within the budget."""
    promises: list[tuple[Promise, float]] = [("window", PROMISE), ("request", WINDOW_FLOOR)]
    for promise, least in promises:
        drafts = Drafts(lambda _, position: position % 110 < 100, 0.05)
        cost: Cost = lambda rows: 1 + 0.1 * (rows - 1)  # noqa: E731
        steps, _ = decode(drafts, cost, lambda rows: 1 + 0.1 * rows, 2000, promise=promise)
        assert slowest_window(steps, 1.0, "0") >= least
        assert speed(steps) > 1.2


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.005, DRAFT_AT_MOST),
    st.floats(0.01, 1.0),
    st.integers(2, 600),
    st.floats(0.0, 0.3),
    st.lists(st.floats(0.4, 1.0), min_size=16, max_size=16),
    st.integers(0, 999),
)
def test_a_draft_model_that_does_not_pay_costs_no_more(
    drafting: float, share: float, prompt: int, rate: float, increments: list[float], seed: int
) -> None:
    """Of random pairs, in three requests, what the draft reads of their prompts included. share: of what a
    token takes that it proposes, for one that it reads."""
    text, cost = coins(rate, seed), costs(increments, 1)
    drafts = Drafts(lambda _, position: text[position], drafting, drafting * share)
    speculator = None
    for tokens in (prompt, 2, prompt):
        steps, speculator = decode(
            drafts, cost, lambda rows: 1 + 0.05 * rows, 260, prompt=tokens, speculator=speculator
        )
        assert slowest_beginning(steps, 1.0, "0") >= PROMISE - 1e-9


def test_n_grams_stand_in_for_a_draft_model_that_does_not_pay() -> None:
    """It is hardly ever asked then, and each one's acceptance is its own."""
    drafts, spare = Drafts(lambda *_: False, 0.1, 0.01), Matches(lambda *_: True)
    steps, speculator = decode(
        drafts, lambda rows: 0.9 + 0.1 * rows, lambda rows: 0.9 + 0.1 * rows, 600, spare=spare, prompt=300
    )
    assert speed(steps) > 0.9 * 17 / 2.6
    assert speculator.figures.acceptance > 0.99


def test_a_draft_model_that_pays_reads_long_prompts() -> None:
    """A part now and then, as it can be afforded; what it wins pays for the next prompts at once."""
    drafts = Drafts(lambda *_: True, 0.05, 0.01)
    found: list[float] = []
    speculator = None
    for _ in range(2):
        steps, speculator = decode(
            drafts,
            lambda rows: 0.9 + 0.1 * rows,
            lambda rows: 0.9 + 0.1 * rows,
            400,
            prompt=400,
            speculator=speculator,
        )
        found.append(next(step.end for step in steps if step.rows > 1) - steps[0].begin)
    assert found[0] < 325 and found[1] < 10


@pytest.mark.parametrize("thinking", [0.0, 0.2])
@pytest.mark.parametrize("drafting", [0.0, 0.05])
def test_hopeless_drafts_are_given_up(drafting: float, thinking: float) -> None:
    """Acceptance 0 in 3,000 steps: what was tried in vain takes less than 1 % of the time, asking another."""
    drafts, shape = Drafts(lambda *_: False, drafting), lambda rows: 0.9 + 0.1 * rows
    steps, speculator = decode(drafts, lambda rows: 0.7 + 0.3 * rows, shape, 3000, thinking=thinking)
    assert speed(steps) > (0.98 if thinking else 0.99)
    assert speculator.figures.lengths[0] > 2900


@pytest.mark.parametrize("thinking", [0.0, 0.2])
@pytest.mark.parametrize("drafting", [0.0, 0.05])
def test_drafts_that_become_right_are_found(drafting: float, thinking: float) -> None:
    """Wrong for 500 tokens, right from there on: probing, or a look at what would have been, finds out."""
    drafts = (Drafts if drafting else Matches)(lambda _, position: position > 500, drafting)
    cost: Cost = lambda rows: 0.9 + 0.1 * rows  # noqa: E731
    steps, _ = decode(drafts, cost, cost, 2000, thinking=thinking)
    assert speed(steps[-500:]) > 2.5


def test_the_next_request_begins_anew() -> None:
    """Wrong for two whole texts, right in the next one, where it is tried after some steps."""
    answers, speculator, found = [False], None, list[float]()
    drafts = Drafts(lambda *_: answers[-1], 0.1)
    for right in (False, False, True):
        answers.append(right)
        steps, speculator = decode(
            drafts, measured_cost("demo"), lambda rows: 1 + 0.1 * rows, 300, speculator=speculator
        )
        found.append(speed(steps[:60]))
    assert min(found) >= 0.97 and found[2] > 1.5


@given(st.lists(st.tuples(st.floats(1, 4), st.integers(1, 17)), max_size=200))
def test_the_ledger_knows_the_worst_window(steps: list[tuple[float, int]]) -> None:
    """What may be lost next, by a slow sum over all windows that it may be in, with plain steps behind it."""
    ledger = Ledger("window")
    for seconds, tokens in steps:
        ledger.add(seconds, tokens)
    costs = [seconds - tokens / PROMISE for seconds, tokens in steps]
    lefts = []
    for before in [*range(min(WINDOW, len(costs) + 1)), len(costs)]:
        plain_behind = max(0, WINDOW - before - 1)
        lefts.append(plain_behind * LOSS + 1 / PROMISE - 1 - sum(costs[len(costs) - before :]))
    assert ledger.left == pytest.approx(min(lefts), abs=1e-6)


def test_what_was_won_in_a_window_can_be_lost_in_it_and_no_more() -> None:
    ledger = Ledger("window")
    ledger.add(2.5, 1)
    poor = ledger.left
    ledger.add(1.5, 9)
    assert ledger.left == pytest.approx(BUDGET) and poor == pytest.approx(BUDGET - 1.5)
    ledger.add(1.5, 9)
    assert ledger.left == pytest.approx(BUDGET)  # a window may begin behind both


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_time_does_not_make_drafts_look_free(seed: int) -> None:
    """A machine that takes twice as long now and then: what was measured in such a time is measured anew."""
    text, model = coins(0.1), measured_cost("random MoE")
    drafts = Matches(lambda _, position: text[position])
    chosen, until, factor = random.Random(seed), 0.0, 1.0

    def cost(rows: int) -> float:
        nonlocal until, factor
        if drafts.now >= until:
            until, factor = drafts.now + chosen.expovariate(1 / 150), 3.0 - factor
        return factor * model(rows)

    plain = 0.0  # what the same rows would take one by one, in their time

    def both(rows: int) -> float:
        nonlocal plain
        taken = cost(rows)
        plain += factor
        return taken

    steps, _ = decode(drafts, both, lambda rows: 1 + 0.05 * rows, 800)
    assert sum(step.tokens["0"] for step in steps) * plain / len(steps) >= 0.97 * steps[-1].end
