"""The best logits of a row, chosen by threads over spans of columns: what sorting the whole row gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.backends.cpu import CpuBackend
from strata.engine.sampler import top_k

CPU = [CpuBackend(threads=threads) for threads in (1, 2)]


def check(rows: np.ndarray, count: int, columns: int) -> None:
    wanted = [top_k(row[:columns], count) for row in rows]
    for cpu in CPU:
        found = cpu.best_logits(rows, count, columns)
        assert found is not None
        for ids, values, best in zip(found.ids, found.values, wanted, strict=True):
            assert ids.tolist() == best.ids.tolist()
            assert np.array_equal(values.astype(np.float64), best.logits)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 9000), st.integers(1, 70), st.booleans())
def test_they_are_those_of_a_sort(seed: int, rows: int, columns: int, count: int, equal: bool) -> None:
    """Equal ones, zeros of both signs and those beyond the columns that count included."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, columns + 5)).astype(np.float32)
    if equal:
        logits = np.round(logits) * np.float32(-1)
    logits[:, columns:] = np.inf
    check(logits, min(count, columns), columns)


@pytest.mark.parametrize("descending", [False, True])
def test_a_row_in_order(descending: bool) -> None:
    row = np.arange(20000, dtype=np.float32)[None]
    check(np.ascontiguousarray(row[:, ::-1]) if descending else row, 200, 20000)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 12287, 12299])
def test_a_row_that_is_not_finite_is_seen(bad: float, place: int) -> None:
    rows = np.zeros((3, 12300), np.float32)
    rows[1, place] = bad
    assert all(cpu.best_logits(rows, 1, 12300) is None for cpu in CPU)
    check(rows[[0, 2]], 2, 12300)


def test_impossible_ones_are_no_candidates() -> None:
    rows = np.full((1, 9000), -np.inf, np.float32)
    rows[0, [5, 8999]] = 1.0, 2.0
    check(rows, 2, 9000)
    assert all(cpu.best_logits(rows, 3, 9000) is None for cpu in CPU)


def test_numbers_that_cannot_be() -> None:
    rows = np.zeros((1, 10), np.float32)
    for count, columns, message in ((1, 11, "columns that count is 11"), (6, 5, "wanted of a row is 6")):
        with pytest.raises(ValueError, match=message):
            CPU[0].best_logits(rows, count, columns)
