"""Hybrid execution computes what the CPU backend computes: every architecture, split, policy and order."""

from __future__ import annotations

import numpy as np
import pytest
from hybrids import Hybrid, Plain, make_hybrid, tokens
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend

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


def run(model: Hybrid | Plain) -> list[np.ndarray]:
    ids, found = tokens(sum(CHUNKS)), []
    for size in CHUNKS:
        found.append(model.feed(ids[model.done : model.done + size]))
    return found


@pytest.mark.parametrize("misses", ["cpu", "fetch", "auto"])
@pytest.mark.parametrize("name", SPECS)
def test_every_architecture_and_split(cpu: CpuBackend, name: str, misses: str) -> None:
    spec = SPECS[name]
    store = TinyStore(spec)
    wanted = np.concatenate(run(Plain.make(cpu, store, spec)))
    hybrid = make_hybrid(cpu, store, spec, seed=1, misses=misses)
    found = np.concatenate(run(hybrid))
    hybrid.close()
    assert np.abs(found - wanted).max() < BOUND * wanted.std()
