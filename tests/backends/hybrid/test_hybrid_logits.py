"""Hybrid execution computes what the CPU backend computes: every architecture, split, policy and order."""

from __future__ import annotations

import numpy as np
import pytest
from hybrids import Plain, feed_chunks, make_hybrid
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.parts import RoutedFfn

SPECS = {
    "moe": moe_spec(),
    "gpt_oss": gpt_oss_spec(),
    "mla": mla_spec(),
    "mla_full": mla_spec(0),
    "tied": moe_spec(tied_head=True),
    "dense": moe_spec(moe_layers=(False, False)),
}
CHUNKS = (7, 1, 1, 11, 1, 1, 1)
# Sums in another order, f32 activations: measured below 3e-6 at a deviation of 5.
BOUND = 1e-4


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=1, activations="f32")


@pytest.mark.parametrize("misses", ["cpu", "fetch", "auto"])
@pytest.mark.parametrize("name", SPECS)
def test_every_architecture_and_split(cpu: CpuBackend, name: str, misses: str) -> None:
    spec = SPECS[name]
    store = TinyStore(spec)
    wanted = feed_chunks(Plain.make(cpu, store, spec), CHUNKS)
    hybrid = make_hybrid(cpu, store, spec, seed=1, misses=misses)
    found = feed_chunks(hybrid, CHUNKS)
    hybrid.close()
    assert np.abs(found - wanted).max() < BOUND * wanted.std()


def test_ops_of_a_layer_one_by_one(cpu: CpuBackend) -> None:
    """`choose_experts`, `apply_experts` and `experts` by themselves, some experts left out."""
    spec = SPECS["mla"]
    hybrid, plain = make_hybrid(cpu, TinyStore(spec), spec, seed=4), Plain.make(cpu, TinyStore(spec), spec)
    rows = np.random.default_rng(2).standard_normal((5, spec.hidden)).astype(np.float32)
    backend, found, wanted = hybrid.backend, [], []
    parts = [model.decoder.layers[1].ffn for model in (hybrid, plain)]
    assert all(isinstance(part, RoutedFfn) for part in parts)
    residual = backend.memory.uploads.matrix(rows, backend.memory.workspace, "rows")
    for ops, part, values, results in (
        (backend, parts[0], residual, found),
        (cpu, parts[1], rows.copy(), wanted),
    ):
        routing = ops.choose_experts(values, part.router)
        results += [routing.ids, routing.weights]
        for active in (None, [0, 2, 3], []):
            some = ops.experts(*routing, part.experts.bank, part.experts.gating, active)
            results.append(ops.to_numpy(some).copy())
        ops.apply_experts(values, routing, part.experts)
        results.append(ops.to_numpy(values).copy())
    for mine, theirs in zip(found, wanted, strict=True):
        assert np.abs(mine - theirs).max() < BOUND * max(1, np.abs(theirs).max())
    hybrid.close()


def test_shapes_are_checked_with_both_numbers(cpu: CpuBackend) -> None:
    spec = SPECS["moe"]
    hybrid = make_hybrid(cpu, TinyStore(spec), spec)
    backend, layer = hybrid.backend, hybrid.decoder.layers[0]
    x = backend.memory.uploads.matrix(np.ones((2, 30), np.float32), backend.memory.workspace, "rows")
    with pytest.raises(ValueError, match=f"linear: columns of x 30, columns of the weight {spec.hidden}"):
        backend.linear(x, layer.attention.qkv)
    with pytest.raises(ValueError, match="split_heads: columns of x 30, heads \\* sum of the sizes 31"):
        backend.split(x, [15, 16])
    with pytest.raises(ValueError, match="add: residual"):
        backend.add(x, backend.split(x, [10, 20])[0])
    hybrid.close()
