"""The router's variants against a second, plain-Python telling of RouterSpec, and their known traps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.plan.spec import RouterSpec

torch = pytest.importorskip("torch")
from strata.backends.reference import ReferenceBackend  # noqa: E402

VARIANTS = [
    RouterSpec(
        experts,
        k,
        score,
        normalize,
        eps,
        scale,
        select_bias=bias,
        groups=groups,
        top_groups=top,
        group_score=by,
    )
    for experts, k in ((8, 1), (8, 4), (64, 8), (128, 8))
    for score, normalize, eps in (
        ("softmax", True, 0.0),
        ("softmax", False, 0.0),
        ("sigmoid", True, 1e-20),
        ("sigmoid", False, 0.0),
        ("softmax_topk", False, 0.0),
    )
    for scale in (1.0, 2.5)
    for bias, groups, top, by in ((False, 1, 1, "max"), (True, 4, 2, "top2"), (False, 4, 2, "max"))
]


def by_hand(logits: list[float], spec: RouterSpec, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One row, in Python floats."""
    shares = [math.exp(x - max(logits)) for x in logits]
    scores = {
        "softmax": [share / sum(shares) for share in shares],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in logits],
        "softmax_topk": list(logits),
    }[spec.score]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = spec.experts // spec.groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(spec.groups)]
    counted = 1 if spec.group_score == "max" else 2
    value = [sum(sorted((choice[e] for e in group), reverse=True)[:counted]) for group in members]
    best_groups = sorted(range(spec.groups), key=lambda g: (-value[g], g))[: spec.top_groups]
    allowed = [e for g in best_groups for e in members[g]]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: spec.top_k]
    weights = [scores[e] for e in ids]
    if spec.score == "softmax_topk":
        shares = [math.exp(w - max(weights)) for w in weights]
        weights = [share / sum(shares) for share in shares]
    elif spec.normalize:
        weights = [w / (sum(weights) + spec.normalize_eps) for w in weights]
    return ids, [w * spec.scale for w in weights]


def route(logits: np.ndarray, spec: RouterSpec, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    backend = ReferenceBackend()
    return backend.route(backend.vector(logits), spec, None if bias is None else backend.vector(bias))


@pytest.mark.parametrize("spec", VARIANTS, ids=str)
def test_every_variant_matches_the_telling(spec: RouterSpec) -> None:
    """case-43: softmax over all or over the chosen, scaling without normalizing, bias out of the weights."""
    rng = np.random.default_rng(spec.experts * 31 + spec.top_k)
    logits = rng.standard_normal((5, spec.experts)).astype(np.float32) * 2
    bias = rng.standard_normal(spec.experts).astype(np.float32) if spec.select_bias else None
    ids, weights = route(logits, spec, bias)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    for row in range(len(logits)):
        expected = by_hand(logits[row].tolist(), spec, None if bias is None else bias.tolist())
        assert ids[row].tolist() == expected[0]
        np.testing.assert_allclose(weights[row], expected[1], rtol=2e-6)


@given(
    row=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0]), min_size=8, max_size=8),
    k=st.integers(1, 8),
    score=st.sampled_from(["softmax", "sigmoid", "softmax_topk"]),
)
@settings(max_examples=100, deadline=None)
def test_equal_logits_go_to_the_lowest_index(row: list[float], k: int, score: str) -> None:
    """case-43, ties: equal logits give equal scores, and every run must choose the same experts."""
    ids, _ = route(np.array([row], np.float32), RouterSpec(8, k, score), None)
    assert ids[0].tolist() == sorted(range(8), key=lambda e: (-row[e], e))[:k]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """case-43: a correction bias that leaks into the weights."""
    spec = RouterSpec(4, 2, "sigmoid", normalize=False, select_bias=True)
    logits = np.zeros((1, 4), np.float32)
    ids, weights = route(logits, spec, np.array([0.0, 5.0, 0.0, 9.0], np.float32))
    assert ids.tolist() == [[3, 1]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_rows_do_not_influence_each_other() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((9, 12)).astype(np.float32)
    spec = RouterSpec(12, 3, "sigmoid", True, 1e-20, 2.5)
    together = route(logits, spec, None)
    for row, part in itertools.product(range(9), range(2)):
        assert (route(logits[row : row + 1], spec, None)[part][0] == together[part][row]).all()


def test_wrong_number_of_experts_is_named() -> None:
    with pytest.raises(ValueError, match="route: columns of the logits 7, experts 8"):
        route(np.zeros((1, 7), np.float32), RouterSpec(8, 2), None)
