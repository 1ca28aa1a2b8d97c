"""The replay of drafts: what it reckons can be reckoned by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from strata.engine.bench.speculation import Workload


def load() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "replay_drafts.py"
    spec = importlib.util.spec_from_file_location("replay_drafts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_costs_are_interpolated_and_never_fall() -> None:
    script = load()
    times = {length: 2.0 + 0.2 * length for length in script.LENGTHS} | {3: 9.0}
    cost = script.cost_of(times)
    assert cost(1) == 1.0 and cost(3) == pytest.approx(1.2)
    assert cost(10) == 4.5  # nine tokens are not measured; fewer took 9 s
    assert script.cost_of({length: 1.0 + length for length in script.LENGTHS})(12) == pytest.approx(12.0)


def test_a_text_that_repeats_goes_forward_by_whole_drafts() -> None:
    """One token and four of a draft in each step of 1.5 plain ones; nothing where nothing matches."""
    script = load()
    same = Workload("same", [7] * 8, [7] * 101)
    found = script.replayed(same, lambda rows: 1.0 if rows == 1 else 1.5, 2, 0.0)
    assert found["fixed 4"] == [pytest.approx(5 / 1.5)]
    assert found["cost-aware"][1] > found["fixed 8"][0] > found["fixed 4"][0]
    new = Workload("new", list(range(8)), list(range(8, 109)))
    assert script.replayed(new, lambda rows: float(rows), 1, 0.0)["cost-aware"] == [1.0]
