"""Drafts by what pays, beside fixed lengths, with the step times of real models (virtual time)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
from simulated import (
    MODELS,
    Cost,
    Drafts,
    Matches,
    changes,
    coins,
    decode,
    measured_cost,
    runs,
    slowest_window,
    speed,
)

from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import WINDOW_FLOOR

TEXTS = {
    "edit": runs(150, 8),
    "lists": runs(40, 10),
    "prose": runs(4, 12),
    "repeat": [True] * 6000,
    "misleading": coins(0.1),
    "often right": coins(0.8),
    "changes": changes(),
    "right, then wrong": [position % 400 < 300 for position in range(6000)],
    **{f"right {rate}": coins(rate) for rate in (0.0, 0.6, 0.8, 0.9, 1.0)},
}
MATCHED = list(TEXTS)[:8]


@cache
def speeds(model: str, text: str, drafts: type[Drafts], drafting: float = 0.0) -> dict[str, float]:
    """Tokens per plain step of fixed lengths and of what pays, over 400 steps; and its slowest window."""
    cost, right = measured_cost(model), right_in(TEXTS[text])
    found = {"plain": 1.0}
    for length in (4, 8):
        fixed = LengthOptions(length, fixed=True)
        found[f"fixed {length}"] = speed(decode(drafts(right, drafting), cost, None, 400, lengths=fixed)[0])
    steps, _ = decode(drafts(right, drafting), cost, lambda rows: 1 + 0.05 * rows, 400)
    return {**found, "pays": speed(steps), "window": slowest_window(steps, 1.0, "0")}


def right_in(text: list[bool]) -> Callable[[str, int], bool]:
    """Whether the draft of a position is right."""
    return lambda _, position: text[position % len(text)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", MATCHED)
def test_matches_are_verified_at_the_best_length_or_near(model: str, text: str) -> None:
    """Within 3 % of the best of plain, 4 and 8, the engine's first steps included; no window is too slow."""
    found = speeds(model, text, Matches)
    assert found["pays"] >= 0.97 * max(found["plain"], found["fixed 4"], found["fixed 8"])
    assert found["window"] >= WINDOW_FLOOR


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_draft_model_is_asked_at_the_best_length_or_near(model: str, text: str) -> None:
    """A token of the draft takes 0.03 plain steps. It is always equally sure of itself, so that only asking
    says that it is right again."""
    found = speeds(model, text, Drafts, 0.03)
    assert found["pays"] >= 0.93 * max(found["plain"], found["fixed 4"], found["fixed 8"])
    assert found["window"] >= WINDOW_FLOOR


@pytest.mark.parametrize("seed", range(5))
def test_disturbed_steps_do_not_end_speculation(seed: int) -> None:
    """Two steps of five take up to three times as long, which teaches nothing."""
    for model in ("demo", "random MoE"):
        chosen, cost = random.Random(seed), measured_cost(model)

        def disturbed(rows: int, chosen: random.Random = chosen, cost: Cost = cost) -> float:
            return cost(rows) * (chosen.uniform(1, 3) if chosen.random() < 0.4 else 1.0)

        found = {}
        for name, lengths in (("8", LengthOptions(8, fixed=True)), ("pays", None)):
            estimate = None if lengths else lambda rows: 1 + 0.05 * rows
            drafts = Matches(right_in([True] * 6000))
            found[name] = speed(decode(drafts, disturbed, estimate, 300, lengths=lengths)[0])
        assert found["pays"] >= 0.97 * found["8"]


def test_texts_that_repeat_gain() -> None:
    """The issue's 1.6, with every model's step times."""
    for model in MODELS:
        for text in ("edit", "repeat"):
            assert speeds(model, text, Matches)["pays"] >= 1.6
