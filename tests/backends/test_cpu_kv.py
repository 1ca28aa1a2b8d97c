"""KV pages of the CPU backend: one block of bytes each, wherever it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata.backends.base import KV_DTYPES, PAGE_ALIGNMENT, AttentionCall, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.cpu_kv import CpuKvCache
from strata.core import Batch, KvDtype, Sequence

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]
BACKEND = CpuBackend(threads=2)
DTYPES: list[KvDtype] = ["int8", "int8g32", "int8t", "bf16", "f32"]
HEADS, TOKENS, GUARD = 4, 37, 0x5A


def spec_of(dtype: KvDtype, value_in_key: bool, page_tokens: int = 8) -> KvSpec:
    """Three layers of sizes that need padding."""
    return KvSpec(3, 1 if value_in_key else 2, 18, 10, page_tokens, dtype, value_in_key, steps_of(dtype, 3))


def steps_of(dtype: KvDtype, layers: int) -> tuple[tuple[float, float], ...]:
    """Another scale in every layer."""
    return tuple((0.03 + 0.01 * i, 0.02 + 0.01 * i) for i in range(layers)) if dtype == "int8t" else ()


def memory(nbytes: int, seed: int = 0) -> Bytes:
    """Random bytes that begin with a cache line."""
    raw = np.random.default_rng(seed).integers(0, 256, nbytes + PAGE_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % PAGE_ALIGNMENT
    return raw[start : start + nbytes]


def attend(cache: CpuKvCache, layer: int, rows: slice, seed: int) -> F32:
    """The rows of one request, whose random queries, keys and values follow from the seed."""
    spec, rng = cache.spec, np.random.default_rng(seed)
    widths = (HEADS * spec.key_dim, spec.kv_heads * spec.key_dim, spec.kv_heads * spec.value_dim)
    q, k, v = (rng.standard_normal((TOKENS, width), dtype=np.float32)[rows] for width in widths)
    positions = np.arange(TOKENS, dtype=np.int32)[rows]
    pages = np.array([3, 0, 4, 1, 2], np.int32)
    batch = Batch(positions, positions, (Sequence(0, len(q), rows.start, pages),), positions[:0])
    call = AttentionCall(layer, HEADS, 0.2, 0, None)
    return BACKEND.attention(q, k, None if spec.value_in_key else v, cache, batch, call)


def all_layers(cache: CpuKvCache, rows: slice = slice(0, TOKENS)) -> list[F32]:
    return [attend(cache, layer, rows, seed=layer) for layer in range(cache.spec.layers)]


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(KV_DTYPES),
    layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    key_dim=st.integers(1, 70),
    value_dim=st.integers(1, 70),
    octets=st.integers(1, 9),
    value_in_key=st.booleans(),
    wrong=st.sampled_from([-64, -1, 1, 64]),
)
def test_sizes_are_those_that_the_kernels_use(
    dtype: KvDtype,
    layers: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    octets: int,
    value_in_key: bool,
    wrong: int,
) -> None:
    value_dim = min(key_dim, value_dim) if value_in_key else value_dim
    steps = steps_of(dtype, layers)
    spec = KvSpec(layers, heads, key_dim, value_dim, 8 * octets, dtype, value_in_key, steps)
    assert spec.page_bytes == layers * spec.layer_bytes and spec.layer_bytes % PAGE_ALIGNMENT == 0
    CpuKvCache(BACKEND.ops, spec, memory(spec.page_bytes), np.zeros(1, np.int64), "")

    class Wrong(KvSpec):
        @property
        def layer_bytes(self) -> int:
            return spec.layer_bytes + wrong

    other = Wrong(layers, heads, key_dim, value_dim, 8 * octets, dtype, value_in_key, steps)
    with pytest.raises(ValueError, match=f"bytes of a layer is {spec.layer_bytes + wrong}, expected"):
        CpuKvCache(BACKEND.ops, other, memory(spec.page_bytes + layers * 64), np.zeros(1, np.int64), "")


def test_a_layer_of_a_real_model_has_no_gaps() -> None:
    """Qwen3-30B-A3B: 4 heads of 128 codes and a scale, twice. DeepSeek's latent: 576 codes and a scale."""
    assert KvSpec(48, 4, 128, 128, 32, "int8").page_bytes == 48 * 32 * 2 * 4 * (128 + 4)
    assert KvSpec(61, 1, 576, 512, 32, "int8", value_in_key=True).page_bytes == 61 * 32 * (576 + 4)
    assert KvSpec(1, 2, 18, 10, 8, "int8").layer_bytes == 2 * 8 * 20 + 2 * 8 * 16 + 2 * 2 * 8 * 4
    assert KvSpec(48, 4, 128, 128, 32, "int8g32").page_bytes == 48 * 32 * 2 * 4 * (128 + 4 * 4)
    assert KvSpec(61, 1, 576, 512, 32, "int8g128", value_in_key=True).page_bytes == 61 * 32 * (576 + 5 * 4)
    assert KvSpec(1, 4, 128, 128, 32, "int8t", steps=((1.0, 1.0),)).page_bytes == 32 * 2 * 4 * 128


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("page_tokens", [8, 16])
def test_pages_may_lie_anywhere(dtype: KvDtype, value_in_key: bool, page_tokens: int) -> None:
    """Downwards from the end of a region, with gaps, full of old bytes; nothing beside them is touched."""
    spec = spec_of(dtype, value_in_key, page_tokens)
    stride = spec.page_bytes + 3 * PAGE_ALIGNMENT
    block = memory(6 * stride)
    offsets = np.array([block.nbytes - (i + 1) * stride for i in range(5)], np.int64)
    outside = np.ones(block.nbytes, bool)
    for at in offsets:
        outside[at : at + spec.page_bytes] = False
    block[outside] = GUARD
    scattered = CpuKvCache(BACKEND.ops, spec, block, offsets, "a region")
    plain = BACKEND.kv_cache(spec, 5)
    for rows in (slice(0, 20), slice(20, 36), slice(36, 37)):
        for mine, theirs in zip(all_layers(scattered, rows), all_layers(plain, rows), strict=True):
            assert np.array_equal(mine, theirs)
    assert (block[outside] == GUARD).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_in_key", [False, True])
def test_a_page_is_one_block_and_a_layer_of_it_one_range(dtype: KvDtype, value_in_key: bool) -> None:
    """Pages whose bytes were moved elsewhere serve as before, and so does each layer by itself."""
    spec = spec_of(dtype, value_in_key)
    cache = BACKEND.kv_cache(spec, 5)
    all_layers(cache, slice(0, 36))
    last = slice(36, 37)
    moved = BACKEND.kv_cache(spec, 5)
    layers = [
        BACKEND.kv_cache(replace(spec, layers=1, steps=spec.steps[i : i + 1]), 5) for i in range(spec.layers)
    ]
    for page in range(5):
        moved.page(page)[:] = cache.page(page)
        for index, layer in enumerate(layers):
            start = index * spec.layer_bytes
            layer.page(page)[:] = cache.page(page)[start : start + spec.layer_bytes]
    expected = all_layers(cache, last)
    for mine, theirs in zip(all_layers(moved, last), expected, strict=True):
        assert np.array_equal(mine, theirs)
    for index, layer in enumerate(layers):
        assert np.array_equal(attend(layer, 0, last, seed=index), expected[index])
        start = index * spec.layer_bytes
        for page in range(5):
            assert np.array_equal(layer.page(page), cache.page(page)[start : start + spec.layer_bytes])


def test_copied_pages_are_the_same_bytes() -> None:
    cache = BACKEND.kv_cache(spec_of("int8", False), 3)
    cache.page(1)[:] = memory(cache.spec.page_bytes)
    BACKEND.copy_pages(cache, [(1, 0), (0, 2)])
    assert np.array_equal(cache.page(2), cache.page(1)) and cache.page(1).any()
