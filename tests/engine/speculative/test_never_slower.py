"""The promise: over any 64 steps a request has at least 0.97 of plain decoding's speed (virtual time)."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Cost, Drafts, decode, slowest_window, speed

from strata.engine.speculative.ledger import BUDGET, WINDOW, Ledger


def costs(increments: list[float]) -> Cost:
    """Seconds by rows: a plain step takes 1, each row more at most as much again."""
    table = list(accumulate(increments, initial=1.0))
    return lambda rows: table[rows - 1]


INCREMENTS = st.lists(st.floats(0.0, 1.0), min_size=64, max_size=64)
SEGMENTS = st.lists(st.tuples(st.integers(1, 80), st.floats(0.0, 1.0)), min_size=1, max_size=8)


def by_segments(segments: list[tuple[int, float]], seed: int) -> list[bool]:
    """Whether each position's draft is right: stretches of a text with an acceptance each."""
    chosen = random.Random(seed)
    found = [chosen.random() < rate for length, rate in segments for _ in range(length)]
    return found * (6000 // len(found) + 1)


@settings(max_examples=40, deadline=None)
@given(INCREMENTS, SEGMENTS, st.integers(0, 999), st.sampled_from([0.0, 0.02, 0.2, 0.5]), st.integers(1, 3))
def test_no_window_is_slower_than_promised(
    increments: list[float],
    segments: list[tuple[int, float]],
    seed: int,
    drafting: float,
    requests: int,
) -> None:
    """Whatever steps cost, whatever is accepted when: also when drafts are right until they are trusted."""
    texts = [by_segments(segments, seed + i) for i in range(requests)]
    drafts = Drafts(lambda name, position: texts[int(name)][position], drafting)
    cost = costs(increments)
    steps, _ = decode(drafts, cost, lambda rows: 1 + 0.05 * rows, 260, requests)
    for name in map(str, range(requests)):
        assert slowest_window(steps, cost(requests), name) >= 0.97 - 1e-9


def test_an_adversary_who_waits_for_trust() -> None:
    """Right for 100 tokens, wrong for 10, again and again: the losses of a window stay within the budget."""
    drafts = Drafts(lambda _, position: position % 110 < 100, 0.05)
    steps, _ = decode(drafts, lambda rows: 1 + 0.1 * (rows - 1), lambda rows: 1 + 0.1 * rows, 2000)
    assert slowest_window(steps, 1.0, "0") >= 0.97
    assert speed(steps) > 1.2


@pytest.mark.parametrize("drafting", [0.0, 0.05])
def test_hopeless_drafts_are_given_up(drafting: float) -> None:
    """Acceptance 0 in 3,000 steps: what was tried in vain takes less than 1 % of the time."""
    drafts = Drafts(lambda *_: False, drafting)
    steps, speculator = decode(drafts, lambda rows: 0.7 + 0.3 * rows, lambda rows: 0.9 + 0.1 * rows, 3000)
    assert speed(steps) > 0.99
    assert speculator.figures.lengths[0] > 2900


@pytest.mark.parametrize("drafting", [0.0, 0.05])
def test_drafts_that_become_right_are_found(drafting: float) -> None:
    """Wrong for 500 tokens, right from there on: probing, or a look at what would have been, finds out."""
    drafts = Drafts(lambda _, position: position > 500, drafting)
    steps, _ = decode(drafts, lambda rows: 0.9 + 0.1 * rows, lambda rows: 0.9 + 0.1 * rows, 2000)
    assert speed(steps[-500:]) > 2.5


CHEAP = [(0.02, 0.0), (0.02, 0.08), (0.1, 0.0)]
DEAR = [(0.1, 0.08), (0.3, 0.0), (0.3, 0.08), (0.6, 0.0), (0.6, 0.08)]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("row", "drafting"), CHEAP + DEAR)
def test_the_best_fixed_length_or_near(rate: float, row: float, drafting: float) -> None:
    """Near the best fixed length, plain decoding included, without having been told which it is.

    Where rows are dear the promise costs up to 13 %: a step may stake half of what may still be lost.
    """
    fixed = [1.0]
    for length in range(1, 17):
        seconds = 1 + row * length + length * drafting
        if seconds <= 1 + BUDGET:
            fixed.append(sum(rate**i for i in range(length + 1)) / seconds)
    chosen = random.Random(5)
    text = [chosen.random() < rate for _ in range(20_000)]
    drafts = Drafts(lambda _, position: text[position], drafting)
    steps, _ = decode(drafts, lambda rows: 1 + row * (rows - 1), lambda rows: 1 + row * (rows - 1), 1000)
    least = 0.96 if (row, drafting) in CHEAP and rate < 0.9 else 0.86
    assert speed(steps[50:]) >= least * max(fixed)


@given(st.lists(st.floats(-8, 2), max_size=300))
def test_the_ledger_knows_the_worst_window(losses: list[float]) -> None:
    """Against a slow sum over every window that ends now; what may be lost next counts in WINDOW steps."""
    ledger = Ledger()
    for loss in losses:
        ledger.add(loss)
    ending = losses[::-1][: WINDOW - 1]
    worst = max(accumulate(ending, initial=0.0))
    assert ledger.left == pytest.approx(BUDGET - worst, abs=1e-9)
