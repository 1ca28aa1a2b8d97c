"""A thousand random cases: sizes of the cache, policies, splits, prompts, and orders of execution."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hybrids import CachedStore, Plain, feed_chunks, make_hybrid
from tiny_model import gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.memory.locked_pieces import LockOptions
from strata.memory.transfers import TransferOptions

# One layer suffices for most of what can go wrong; looking ahead to the next one takes two.
ONE, TWO = ({"layers": layers, "moe_layers": (True,) * layers} for layers in (1, 2))
SPECS = (
    replace(moe_spec(), **ONE),
    replace(gpt_oss_spec(), **ONE),
    replace(mla_spec(), **ONE),
    replace(moe_spec(), **TWO),
)
PASSES = ((1, 1), (5, 1), (20, 1), (20, 3), (1, 1, 1))
BOUND = 1e-4


@pytest.mark.slow  # a thousand runs of whole models: about 20 ms each
def test_a_thousand_random_schedules_compute_the_same() -> None:
    cpu = CpuBackend(threads=1, activations="f32")
    stores = [CachedStore(spec) for spec in SPECS]
    wanted: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
    for seed in range(1000):
        rng = random.Random(seed)
        which, sizes = rng.randrange(len(SPECS)), rng.choice(PASSES)
        spec, store = SPECS[which], stores[which]
        key = which, sizes
        if key not in wanted:
            wanted[key] = feed_chunks(Plain.make(cpu, store, spec), sizes)
        hybrid = make_hybrid(
            cpu,
            store,
            spec,
            seed=seed,
            pages=6,
            policy=rng.choice(("lru", "lfu", "forecast")),
            slots=rng.choice((2, 3, 5, 8, 24)),
            misses=rng.choice(("cpu", "fetch", "auto")),
            locks=LockOptions(rng.choice((0, 1, None)), rng.choice((0, 4000))),
            stream_experts=rng.randint(1, 3),
            inserts_per_step=rng.choice((0, 1, 4, None)),
            prefetch=rng.choice((0.0, 0.4, 2.0)),
            transfers=TransferOptions(
                depth=rng.randint(1, 2),
                speculative_bytes=rng.choice((1, 20_000)),
                staging_bytes=rng.choice((4096, 1 << 16)),
            ),
        )
        found = feed_chunks(hybrid, sizes)
        hybrid.close()
        assert np.abs(found - wanted[key]).max() < BOUND * found.std(), f"seed {seed}"
