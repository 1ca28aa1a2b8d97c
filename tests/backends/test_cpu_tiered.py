"""A model larger than memory: whatever the budget, and in whatever order the disk answers, the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_figures import ROUND
from hypothesis import given, settings
from hypothesis import strategies as st
from late_reader import LateReader
from numpy.typing import NDArray
from packed import random_bank
from tiny_model import EXPERTS, TOP_K, VOCAB, TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import Backend, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.cpu_tiered import DECODE_ROWS
from strata.backends.cpu_weights import as_gating, as_record_shape
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.options import HybridOptions
from strata.backends.parts import RoutedFfn
from strata.core import Batch, Sequence
from strata.device.emulated import EmulatedDevice
from strata.errors import StoreError
from strata.memory.expert_host import HostExperts
from strata.memory.experts import ExpertSpace
from strata.memory.locked_pieces import LockOptions
from strata.memory.policies import POLICIES
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec
from strata.plan.speeds import Speeds
from strata.store.formats import FORMATS, ExpertLayout

SPECS = {"moe": moe_spec(3), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}
PROMPT = 2 * DECODE_ROWS + 3


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(threads=2)


@pytest.fixture(scope="module")
def stores() -> dict[str, TinyStore]:
    return {name: TinyStore(spec, fmt="bf16") for name, spec in SPECS.items()}


def tier_of(store: TinyStore, places: int, seed: int, policy: str, fails: bool = False) -> HostExperts:
    spec = store.spec
    space = ExpertSpace(tuple(EXPERTS * spec.is_moe(index) for index in range(spec.layers)))
    records = {i: store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)}
    reader = LateReader(seed, lambda _: fails, lambda expert, _: store.expert(expert))
    memory = np.zeros(places * max(records.values()), np.uint8)
    return HostExperts(space, records, memory, reader, POLICIES[policy])


def batch_of(tokens: list[int], start: int) -> Batch:
    count = len(tokens)
    sequence = Sequence(0, count, start, np.arange(16, dtype=np.int32))
    positions = np.arange(start, start + count, dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    return Batch(np.array(tokens, np.int32), positions, (sequence,), rows)


def logits_of(spec: ModelSpec, decoder: Decoder, backend: Backend) -> list[NDArray[np.float32]]:
    """Of every row of a long prompt, a short one after it, and three tokens."""
    chance = np.random.default_rng(5)
    cache = backend.kv_cache(KvSpec.of(spec, 8, "f32"), 16)
    found, start = [], 0
    for count in (PROMPT, DECODE_ROWS, 1, 1, 1):
        batch = batch_of(chance.integers(0, VOCAB, count).tolist(), start)
        logits = decoder.forward(batch, cache)
        assert logits is not None
        found.append(backend.to_numpy(logits).copy())
        start += count
    return found


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(SPECS)), places=st.integers(TOP_K, 2 * EXPERTS + 3),
    seed=st.integers(0, 2**32), policy=st.sampled_from(sorted(POLICIES)),
)  # fmt: skip
def test_logits_are_those_of_the_model_in_memory(
    backend: CpuBackend, stores: dict[str, TinyStore], name: str, places: int, seed: int, policy: str
) -> None:
    spec, store = SPECS[name], stores[name]
    tier = tier_of(store, places, seed, policy)
    tiered = logits_of(spec, Decoder(spec, store, backend, tier), backend)
    plain = logits_of(spec, Decoder(spec, store, backend), backend)
    for ours, wanted in zip(tiered, plain, strict=True):
        assert np.array_equal(ours, wanted)
    tier.check_integrity()
    assert tier.cache.statistics.hits + tier.cache.statistics.misses > 0


def test_routes_are_reported_as_without_a_tier(backend: CpuBackend, stores: dict[str, TinyStore]) -> None:
    spec, store = SPECS["moe"], stores["moe"]
    decoders = Decoder(spec, store, backend), Decoder(spec, store, backend, tier_of(store, 5, 1, "lru"))
    for decoder in decoders:
        logits_of(spec, decoder, backend)
    plain, tiered = (decoder.routes for decoder in decoders)
    assert plain.used == tiered.used
    assert all(np.array_equal(plain.ids[layer], tiered.ids[layer]) for layer in plain.ids)


@pytest.mark.parametrize("fmt", ["w4g64", "mxfp4"])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_sums_keep_their_order_over_slices_and_groups(
    backend: CpuBackend, fmt: str, slices: int, rows: int
) -> None:
    """Real formats and shapes: activations are quantized, experts have slices, tokens come in tiles."""
    layout = ExpertLayout(FORMATS[fmt], FORMATS[fmt], 128, 256, slices, fmt == "mxfp4")
    bank = random_bank(layout, 16)
    reader = LateReader(rows, record=lambda expert, _: bank.record(expert.index))
    memory = np.zeros(5 * layout.record_bytes, np.uint8)
    tier = HostExperts(ExpertSpace((16,)), {0: layout.record_bytes}, memory, reader, POLICIES["lru"])
    chance = np.random.default_rng(rows)
    x = chance.standard_normal((rows, 128), np.float32)
    ids = np.array([chance.choice(16, 4, replace=False) for _ in range(rows)], np.int32)
    weights = chance.random((rows, 4), np.float32)
    gating = _gating(SPECS["moe"], backend)
    for active in (None, [1, 2, 7, 11, 15]):
        wanted = backend.experts(x, ids, weights, bank, gating, active)
        found = backend.experts(x, ids, weights, replace(bank, tier=tier), gating, active)
        assert np.array_equal(found, wanted)


def _gating(spec: ModelSpec, backend: CpuBackend):
    ffn = Decoder(spec, TinyStore(spec), backend).layers[-1].ffn
    assert isinstance(ffn, RoutedFfn)
    return ffn.experts.gating


def test_the_hybrid_backend_takes_the_hosts_share_from_the_tier(stores: dict[str, TinyStore]) -> None:
    """Fetches cross from the mapped file, what the host computes comes through the tier: the same bits."""
    spec, store = SPECS["moe"], stores["moe"]
    found = []
    for tier in (None, tier_of(store, 5, 1, "lru")):
        backend = hybrid(spec, store)
        found.append(logits_of(spec, Decoder(spec, store, backend, tier), backend))
        assert tier is None or tier.cache.statistics.misses > 0
        backend.close()
        backend.device.close()
    for ours, wanted in zip(*found, strict=True):
        assert np.array_equal(ours, wanted)


def hybrid(spec: ModelSpec, store: TinyStore) -> HybridBackend:
    """Three slots for all experts, misses computed by the host or fetched as the figures have it."""
    speeds = Speeds(1e9, 1e9, 1e9, device_read=1e9, device_macs=1e9, to_device=1e9, to_host=1e9)
    size = store.expert_layout(spec.layers - 1).record_bytes
    options = HybridOptions(
        slots=3, slot_bytes=size, speeds=speeds, rows=64, logit_rows=64, blocks=32, stream_experts=2,
        prefetch=0.0, locks=LockOptions(None), simulated=speeds,
    )  # fmt: skip
    device = EmulatedDevice(replace(ROUND, memory_bytes=64 << 20), seed=1)
    cpu = CpuBackend(threads=2)
    return HybridBackend(device, HostKernels(cpu), cpu, spec, options)


def test_an_expert_that_cannot_be_read_ends_the_pass_and_not_the_tier(
    backend: CpuBackend, stores: dict[str, TinyStore]
) -> None:
    spec, store = SPECS["moe"], stores["moe"]
    tier = tier_of(store, 6, 3, "lru", fails=True)
    decoder = Decoder(spec, store, backend, tier)
    with pytest.raises(StoreError, match="cannot be read"):
        logits_of(spec, decoder, backend)
    while not tier.idle:
        tier.collect(1.0)
    tier.check_integrity()
    tier._reader.fails = lambda _: False
    plain = logits_of(spec, Decoder(spec, store, backend), backend)
    for ours, wanted in zip(logits_of(spec, decoder, backend), plain, strict=True):
        assert np.array_equal(ours, wanted)


def test_a_sum_is_refused_while_experts_are_missing(backend: CpuBackend) -> None:
    layout = ExpertLayout(FORMATS["bf16"], FORMATS["bf16"], 32, 16, 1, False)
    bank = random_bank(layout, 4)
    ids, weights = np.array([[1, 3]], np.int32), np.ones((1, 2), np.float32)

    shape, gating = (
        as_record_shape(backend.ops, layout),
        as_gating(backend.ops, _gating(SPECS["moe"], backend)),
    )
    split = backend.ops.SplitExperts(shape, 4, ids, weights, [1, 3])
    x = np.ones((1, 32), np.float32)
    split.compute(backend.cpu, x, [3], [bank.record(3)], gating, True)
    with pytest.raises(ValueError, match="experts computed are 0, wanted are 2"):
        split.sum()
    for index, record, problem in (
        (3, bank.record(3), "not wanted"), (2, bank.record(2), "not wanted"),
        (9, bank.record(3), "routed to"), (1, bank.record(1)[:-1], "layout needs"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            split.compute(backend.cpu, x, [index], [record], gating, True)
