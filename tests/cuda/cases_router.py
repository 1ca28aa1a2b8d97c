"""route against the reference backend in f64, every variant of RouterSpec."""

from __future__ import annotations

import numpy as np
import torch
from cases import Case, Prepared, call_of
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.launch_shapes import ROUTER_SCORES
from strata.backends.reference_router import route
from strata.plan.spec import RouterSpec


def prepare(spec: RouterSpec, rows: int, ties: bool = False) -> Prepared:
    rng = np.random.default_rng(spec.experts + spec.top_k)
    logits = rng.standard_normal((rows, spec.experts)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    bias = rng.standard_normal(spec.experts).astype(np.float32) * 0.1 if spec.select_bias else None
    ids, weights = unwritten((rows, spec.top_k), np.int32), unwritten((rows, spec.top_k))
    wide = None if bias is None else torch.from_numpy(bias.astype(np.float64))
    expected = route(torch.from_numpy(logits.astype(np.float64)), spec, wide)
    shape = launch_shapes.route(rows, spec.experts, spec.top_k, spec.groups)
    inputs = (read_only(logits), None if bias is None else read_only(bias))
    choice = (spec.experts, spec.top_k, ROUTER_SCORES[spec.score], spec.groups, spec.top_groups)
    rules = (int(spec.group_score == "top2"), int(spec.normalize), spec.normalize_eps, spec.scale)

    def check() -> None:
        np.testing.assert_array_equal(ids, expected[0].numpy())
        np.testing.assert_allclose(weights, expected[1].numpy(), rtol=3e-6)

    return Prepared(call_of(shape, (*inputs, ids, weights, *choice, *rules)), check)


SPECS = {
    "softmax": RouterSpec(128, 8),
    "softmax-not-normalized": RouterSpec(60, 4, normalize=False, scale=1.5),
    "of-chosen": RouterSpec(33, 4, "softmax_topk"),
    "sigmoid-groups": RouterSpec(
        64,
        6,
        "sigmoid",
        normalize_eps=1e-20,
        scale=2.5,
        select_bias=True,
        groups=8,
        top_groups=3,
        group_score="top2",
    ),
    "softmax-groups": RouterSpec(80, 5, groups=40, top_groups=7, normalize=False),
    "one": RouterSpec(8, 1),
    "negative-logits": RouterSpec(16, 12, "softmax_topk"),
}
CASES = [
    *(Case(name, "router", lambda s=s: prepare(s, 3), True) for name, s in SPECS.items()),
    Case("ties", "router", lambda: prepare(RouterSpec(96, 8, "softmax_topk"), 4, ties=True), True),
    Case("many-experts", "router", lambda: prepare(RouterSpec(512, 10), 2)),
]
