"""Prompts leave the cache alone, guesses come early or are stopped, sizes suffice, errors say why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hybrids import FIGURES, SPEEDS, CachedStore, Hybrid, Plain, make_hybrid, one_sequence, tokens
from tiny_model import EXPERTS, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.core import Batch, ExpertId, Sequence
from strata.device.emulated import EmulatedDevice
from strata.device.figures import LinkFigures
from strata.errors import CapacityError
from strata.memory.experts import ExpertSpace
from strata.memory.heat import Heat
from strata.memory.transfers import TransferOptions
from strata.plan.spec import ModelSpec

ROUTED = moe_spec(3, moe_layers=(True, True, True))


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=1, activations="f32")


def resident(hybrid: Hybrid) -> set[ExpertId]:
    cache = hybrid.backend.cache
    return {expert for expert in cache.space if cache.slot_of(expert) is not None}


def test_a_prompt_crosses_once_and_evicts_nothing(cpu: CpuBackend) -> None:
    hybrid = make_hybrid(cpu, CachedStore(ROUTED), ROUTED, misses="fetch", slots=8, prefetch=2.0)
    ids = tokens(60)
    for index in range(4):
        hybrid.feed(ids[index : index + 1])
    hybrid.backend.memory.queue.drain()
    hybrid.backend.loader.settle()
    before, counts = resident(hybrid), hybrid.backend.cache.statistics
    assert 0 < len(before) <= 8
    evicted, streamed = counts.evictions, hybrid.backend.flow.metrics.streamed
    hybrid.feed(ids[4:36])
    assert resident(hybrid) == before
    assert counts.evictions == evicted
    routed = {ExpertId(layer, i) for layer, of in hybrid.decoder.routes.ids.items() for i in of.flat}
    assert len(routed) > 0.9 * 3 * EXPERTS
    assert hybrid.backend.flow.metrics.streamed - streamed == len(routed - before)
    hybrid.close()


def test_a_prompt_and_a_decoding_request_share_a_pass(cpu: CpuBackend) -> None:
    """The experts of the decoding row may stay; those of the prompt alone stream through."""
    store, ids = CachedStore(ROUTED), tokens(60)
    pages = [np.array([0, 1, 2, 3], np.int32), np.array([4, 5, 6, 7], np.int32)]
    found = []
    hybrid = make_hybrid(cpu, store, ROUTED, misses="fetch", slots=12, seed=3)
    plain = Plain.make(cpu, store, ROUTED)
    for model in (hybrid, plain):
        model.decoder.forward(one_sequence(ids[:6], 0, pages[0], False), model.kv)
        rows = np.arange(21, dtype=np.int32)
        mixed = Batch(
            np.array([*ids[6:7], *ids[20:40]], np.int32),
            np.array([6, *range(20)], np.int32),
            (Sequence(0, 1, 6, pages[0]), Sequence(1, 20, 0, pages[1])),
            rows,
        )
        found.append(model.backend.to_numpy(model.decoder.forward(mixed, model.kv)).copy())
    assert np.abs(found[0] - found[1]).max() < 1e-4 * found[1].std()
    assert hybrid.backend.cache.statistics.misses > 0
    hybrid.close()


def guessing(cpu: CpuBackend, bus: float, spec: ModelSpec = ROUTED, **changes: Any) -> Hybrid:
    """Decodes 30 tokens with guesses, on a bus of so many bytes per second."""
    figures = replace(FIGURES, h2d=LinkFigures(bus, 1e-6, 1e-6), call_s=5e-6)
    base = {
        "misses": "cpu",
        "slots": 10,
        "inserts_per_step": None,
        "prefetch": 0.0,
        "transfers": TransferOptions(staging_bytes=8192, speculative_bytes=1 << 20),
    }
    hybrid = make_hybrid(
        cpu,
        CachedStore(spec),
        spec,
        device=EmulatedDevice(figures),
        speeds=replace(SPEEDS, to_device=bus),
        **{**base, **changes},
    )
    for index in tokens(30):
        hybrid.feed([index])
    return hybrid


def test_guesses_bring_experts_before_they_are_needed(cpu: CpuBackend) -> None:
    steady = replace(ROUTED, residual_scale=0.02)  # rows that hardly change are guessed well
    hybrid, without = guessing(cpu, 1e9, steady), guessing(cpu, 1e9, steady, prefetch=2.0)
    guesses = hybrid.backend.prefetcher.metrics
    assert guesses.needed > 0.6 * guesses.fetched > 0  # at random: 0.25
    assert without.backend.prefetcher.metrics.fetched == 0
    with_hits, plain_hits = (h.backend.flow.metrics for h in (hybrid, without))
    assert with_hits.hits + with_hits.late > plain_hits.hits + plain_hits.late
    hybrid.close()
    without.close()


def test_wrong_guesses_are_stopped_and_a_busy_bus_gets_none(cpu: CpuBackend) -> None:
    slow = guessing(cpu, 1e5)
    assert slow.backend.prefetcher.metrics.skipped > 0
    narrow = guessing(cpu, 1e9, transfers=TransferOptions(staging_bytes=8192, speculative_bytes=1))
    assert narrow.backend.prefetcher.metrics.cancelled > 0
    assert narrow.backend.cache.statistics.abandoned == narrow.backend.prefetcher.metrics.cancelled
    confident = guessing(cpu, 1e9, prefetch=0.6)
    assert confident.backend.prefetcher.metrics.fetched < narrow.backend.prefetcher.metrics.fetched
    for hybrid in (slow, narrow, confident):
        hybrid.close()


def test_a_warm_cache_starts_with_what_was_used_before(cpu: CpuBackend) -> None:
    """Heat of one run warms the next: its first tokens find their experts."""
    space, ids = ExpertSpace((EXPERTS,) * 3), tokens(12)
    heat, changes = Heat("model", space), {"misses": "cpu", "slots": 12, "prefetch": 2.0}
    cold = make_hybrid(cpu, CachedStore(ROUTED), ROUTED, heat=heat, **changes)
    for index in ids:
        cold.feed([index])
    assert all(heat.shares(layer).sum() == pytest.approx(2.0) for layer in range(3)), (
        "two of a layer per token"
    )
    warm = make_hybrid(cpu, CachedStore(ROUTED), ROUTED, heat=heat, seed=5, **changes)
    found, hits = warm.feed(ids[:1]), warm.backend.flow.metrics
    assert found is not None
    warm.backend.memory.queue.drain()
    warm.backend.loader.settle()
    assert resident(warm) >= set(heat.warm_order(10))
    for index in ids[1:4]:
        warm.feed([index])
    assert hits.hits > 0.4 * (hits.hits + hits.computed)
    for hybrid in (cold, warm):
        hybrid.close()


@pytest.mark.parametrize("spec", [ROUTED, gpt_oss_spec(), mla_spec(), moe_spec(moe_layers=(False, False))])
@pytest.mark.parametrize("rows", [1, 32])
def test_the_workspace_and_the_inputs_suffice_for_the_largest_pass(
    cpu: CpuBackend, spec: Any, rows: int
) -> None:
    """Without the slack for alignment of small arrays, the sums are those of the largest layer."""
    hybrid = make_hybrid(
        cpu, CachedStore(spec), spec, rows=rows, logit_rows=rows, misses="auto", prefetch=0.0
    )
    for _ in range(2):
        hybrid.feed(tokens(rows))
    level = hybrid.backend.memory.workspace.level()
    assert level.peak <= level.total
    static = hybrid.backend.memory.region.static.level()
    assert static.used <= static.total
    hybrid.close()


def test_errors_name_the_numbers(cpu: CpuBackend) -> None:
    small = EmulatedDevice(replace(FIGURES, memory_bytes=100_000))
    with pytest.raises(CapacityError, match="of 100000 are free"):
        make_hybrid(cpu, CachedStore(ROUTED), ROUTED, device=small)
    hybrid = make_hybrid(cpu, CachedStore(ROUTED), ROUTED)
    with pytest.raises(CapacityError, match="a second KV cache"):
        hybrid.backend.kv_cache(hybrid.kv.spec, 1)
    with pytest.raises(CapacityError, match=r"lower engine\.prefill_chunk"):
        hybrid.feed(tokens(60))
    assert hybrid.feed(tokens(3)) is not None, "a pass that failed leaves nothing behind"
    hybrid.close()
