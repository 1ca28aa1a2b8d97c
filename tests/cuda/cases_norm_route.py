"""norm_route against the reference backend in f64: norm, logits and choice."""

from __future__ import annotations

import numpy as np
import torch
from cases import Case, Prepared, assert_close, call_of
from cases_router import SPECS
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.launch_shapes import ROUTER_SCORES
from strata.backends.reference import ReferenceBackend
from strata.backends.reference_router import route
from strata.plan.spec import RouterSpec

EPS = 1e-2
"""Large enough to show in a row of small numbers."""


def prepare(spec: RouterSpec, rows: int, columns: int, bias: bool = False, keep: bool = True) -> Prepared:
    rng = np.random.default_rng(spec.experts + columns)
    x = rng.standard_normal((rows, columns)).astype(np.float32) * 3
    x[-1] *= 0.03
    norm = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    matrix = rng.standard_normal((spec.experts, columns)).astype(np.float32) * 2 / columns**0.5
    offsets = rng.standard_normal(spec.experts).astype(np.float32) if bias else None
    select = rng.standard_normal(spec.experts).astype(np.float32) * 0.1 if spec.select_bias else None
    reference = ReferenceBackend(torch.float64)
    normed = reference.rms_norm(torch.from_numpy(x.astype(np.float64)), reference.vector(norm), EPS).numpy()
    logits = normed @ matrix.astype(np.float64).T + (0.0 if offsets is None else offsets)
    wide = None if select is None else torch.from_numpy(select.astype(np.float64))
    expected = [part.numpy() for part in route(torch.from_numpy(logits), spec, wide)]
    hidden = unwritten(x.shape) if keep else None
    ids, weights = unwritten((rows, spec.top_k), np.int32), unwritten((rows, spec.top_k))
    shape = launch_shapes.norm_route(rows, spec.experts, spec.top_k, spec.groups)
    tickets = np.zeros(shape.grid[1], np.uint32)
    choice = (spec.experts, spec.top_k, ROUTER_SCORES[spec.score], spec.groups, spec.top_groups)
    rules = (int(spec.group_score == "top2"), int(spec.normalize), spec.normalize_eps, spec.scale)
    inputs = (None if a is None else read_only(a) for a in (norm, matrix, offsets, select))
    outputs = (ids, weights, unwritten((rows, spec.experts)), tickets)
    pointers = (read_only(x), hidden, *inputs, *outputs)
    call = call_of(shape, (*pointers, rows, columns // 4, *choice, *rules, EPS))

    def check() -> None:
        if hidden is not None:
            assert_close(hidden, normed, 2e-6)
        np.testing.assert_array_equal(ids, expected[0])
        np.testing.assert_allclose(weights, expected[1], rtol=2e-4)
        assert not tickets.any()

    return Prepared(call, check, {(3,): matrix.nbytes * shape.grid[1]})


def case(name: str, ptx: bool, spec: str, *arguments: object) -> Case:
    return Case(name, "norm_route", lambda: prepare(SPECS[spec], *arguments), ptx)  # type: ignore[arg-type]


# 33 experts leave warps without one; nine rows and more are two tiles.
CASES = [
    case("softmax", True, "softmax", 1, 256),
    case("guess", True, "softmax-not-normalized", 3, 132, False, False),
    case("sigmoid-groups", True, "sigmoid-groups", 5, 512, True),
    case("of-chosen", False, "of-chosen", 11, 64, True),
    case("two-tiles", False, "softmax-groups", 9, 36),
    case("one", False, "one", 2, 1024),
]
