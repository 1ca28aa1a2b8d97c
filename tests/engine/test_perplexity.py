"""Perplexity, agreement and divergence: by hand on small numbers, and over a small decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import VOCAB, TinyStore, make_backend, moe_spec

from strata.engine.perplexity import Predictions, Score, compare, predictions, score, split_windows
from strata.model.decoder import Decoder

TOKENS = np.random.default_rng(5).integers(VOCAB, size=75).tolist()


def expected(probabilities: list[list[float]], following: list[int]) -> Predictions:
    return Predictions(np.log(np.array(probabilities, np.float32)), np.array(following))


def walk(windows: Sequence[Sequence[int]], backend: str = "cpu", chunk: int = 16) -> list[Predictions]:
    spec = moe_spec()
    decoder = Decoder(spec, TinyStore(spec, fmt="w4g64"), make_backend(backend, 1, "f32"))  # type: ignore[arg-type]
    return list(predictions(decoder, windows, "f32", chunk=chunk, page_tokens=8))


def test_perplexity_is_the_geometric_mean_of_one_over_probability() -> None:
    parts = [expected([[0.5, 0.5], [0.25, 0.75]], [1, 0]), expected([[0.125, 0.875]], [0])]
    found = score(parts)
    assert found.perplexity == pytest.approx((2 * 4 * 8) ** (1 / 3))
    spread = np.std(np.log([2, 4, 8]), ddof=1) / math.sqrt(3)
    assert found.standard_error == pytest.approx(found.perplexity * spread)


def test_logits_need_not_be_probabilities() -> None:
    """A softmax does not change when a constant is added, and large numbers do not overflow."""
    plain = expected([[0.5, 0.25, 0.25]], [0])
    assert score([Predictions(plain.logits + 1e4, plain.following)]).perplexity == pytest.approx(2, rel=1e-3)


def test_comparison_by_hand() -> None:
    truth = [expected([[0.6, 0.4], [0.8, 0.2]], [0, 1])]
    other = [expected([[0.4, 0.6], [0.9, 0.1]], [0, 1])]
    found = compare(truth, {"other": other, "same": truth})
    one, same = found["other"], found["same"]
    assert one.change == pytest.approx(math.sqrt(0.6 * 0.2 / (0.4 * 0.1)) - 1)
    losses = np.log([0.6 / 0.4, 0.2 / 0.1])
    assert one.change_error == pytest.approx((1 + one.change) * losses.std(ddof=1) / math.sqrt(2))
    assert one.agreement == 0.5
    first = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    second = 0.8 * math.log(0.8 / 0.9) + 0.2 * math.log(0.2 / 0.1)
    assert one.divergence == pytest.approx((first + second) / 2, abs=1e-5)
    assert (same.change, same.change_error, same.agreement, same.divergence) == (0, 0, 1, 0)
    assert one.score.perplexity == pytest.approx(one.reference.perplexity * (1 + one.change))


def test_an_error_needs_two_values() -> None:
    assert math.isnan(Score(np.array([1.0])).standard_error)


def test_walks_of_different_length_are_refused() -> None:
    part = expected([[0.5, 0.5]], [0])
    with pytest.raises(ValueError, match="zip"):
        compare([part, part], {"short": [part]})


@given(st.integers(0, 60), st.integers(2, 20))
def test_windows_hold_every_token_once(count: int, length: int) -> None:
    """All but a last window of one token, which predicts nothing."""
    cut = split_windows(range(count), length)
    joined = [token for window in cut for token in window]
    assert joined == list(range(count - (count % length == 1)))
    assert all(len(window) == length for window in cut[:-1])


def test_the_chunk_size_changes_neither_targets_nor_predictions() -> None:
    windows = split_windows(TOKENS, 40)
    whole, small, single = (walk(windows, chunk=chunk) for chunk in (64, 7, 1))
    assert len(whole) == 2 and len(single) == len(TOKENS) - 2
    for parts in (whole, small, single):
        assert [t for part in parts for t in part.following] == TOKENS[1:40] + TOKENS[41:]
    found = compare(whole, {"again": walk(windows, chunk=64)})["again"]
    assert found.divergence == 0
    rows = [np.concatenate([part.logits for part in parts]) for parts in (whole, small, single)]
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows[2], rows[0], rtol=1e-4, atol=1e-5)


def test_every_window_begins_without_a_past() -> None:
    together = walk([TOKENS[:30], TOKENS[30:60]])
    alone = walk([TOKENS[30:60]])
    np.testing.assert_array_equal(together[-1].logits, alone[-1].logits)


def test_backends_agree() -> None:
    windows = split_windows(TOKENS, 40)
    found = compare(walk(windows, "reference"), {"cpu": walk(windows)})["cpu"]
    assert found.divergence < 1e-9 and found.agreement == 1
