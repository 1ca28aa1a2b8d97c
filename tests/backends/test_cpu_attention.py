"""The CPU's attention: every geometry and instruction set against `reference`, and bit against bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from strata.backends.base import AttentionCall, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.isa import extension
from strata.backends.reference import ReferenceBackend
from strata.core import Batch, KvDtype, Sequence

F32 = NDArray[np.float32]
REFERENCE = ReferenceBackend()
ISAS = ["avx2", *(["avx512"] if extension().features()["avx512"] else [])]
# rms error relative to the rms of the result. f32 and bf16: rounding of sums (measured 2e-6 at most). int8:
# queries and softmax weights of 16 bits (measured 1e-5 with flat weights to 1.3e-4 with peaked ones).
BOUNDS: dict[KvDtype, float] = {"f32": 5e-6, "bf16": 5e-6, **dict.fromkeys(get_args(KvDtype)[:5], 2e-4)}
DTYPES: list[KvDtype] = ["f32", "bf16", "int8", "int8g32"]
OTHERS: list[KvDtype] = ["int8g64", "int8g128", "int8t"]


@dataclass(frozen=True)
class Shape:
    """heads / kv_heads x key_dim / value_dim, tokens per page."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page_tokens: int
    window: int = 0
    sinks: bool = False

    def spec(self, dtype: KvDtype) -> KvSpec:
        mla = self.key_dim == 576
        steps = ((6 / 127, 5 / 127),) if dtype == "int8t" else ()
        return KvSpec(1, self.kv_heads, self.key_dim, self.value_dim, self.page_tokens, dtype, mla, steps)


SHAPES = [
    Shape(1, 1, 64, 64, 8),
    Shape(4, 2, 64, 64, 64, window=50, sinks=True),
    Shape(3, 1, 80, 80, 24),
    Shape(5, 1, 96, 96, 16, sinks=True),
    Shape(16, 2, 128, 128, 32),
    Shape(6, 1, 128, 128, 40, window=300),
    Shape(14, 2, 128, 128, 8, window=1),
    Shape(12, 4, 192, 128, 64),
    Shape(16, 1, 256, 256, 16),
    Shape(40, 1, 576, 512, 32),
    Shape(33, 1, 576, 512, 24, window=70),
    Shape(9, 3, 18, 10, 56),
]


@dataclass(frozen=True)
class Rows:
    """What one attention op is given beside its cache."""

    q: F32
    k: F32
    v: F32 | None

    @classmethod
    def random(cls, shape: Shape, rows: int, seed: int = 1, sharpness: float = 1.0) -> Rows:
        rng = np.random.default_rng(seed)

        def normal(width: int) -> F32:
            return rng.standard_normal((rows, width), dtype=np.float32)

        v = None if shape.key_dim == 576 else normal(shape.kv_heads * shape.value_dim)
        q = normal(shape.heads * shape.key_dim) * np.float32(sharpness)
        return cls(q, normal(shape.kv_heads * shape.key_dim), v)

    def part(self, rows: slice) -> Rows:
        return Rows(self.q[rows], self.k[rows], None if self.v is None else self.v[rows])


class Cache:
    """One KV cache and one request on it, whose pages are scattered."""

    def __init__(self, backend: CpuBackend, shape: Shape, dtype: KvDtype, tokens: int) -> None:
        self.backend, self.shape = backend, shape
        self.pages = np.random.default_rng(9).permutation(-(-tokens // shape.page_tokens)).astype(np.int32)
        self.kv = backend.kv_cache(shape.spec(dtype), len(self.pages))

    def attend(self, rows: Rows, start: int = 0) -> F32:
        return self.backend.attention(
            rows.q, rows.k, rows.v, self.kv, self.batch(rows, start), call(self.shape)
        )

    def batch(self, rows: Rows, start: int) -> Batch:
        return Batch(
            positions := np.arange(start, start + len(rows.q), dtype=np.int32),
            positions,
            (Sequence(0, len(rows.q), start, self.pages),),
            np.arange(0, dtype=np.int32),
        )

    def chunks(self, rows: Rows, sizes: Iterator[int]) -> F32:
        """The same rows in steps of these sizes."""
        done, parts = 0, []
        while done < len(rows.q):
            stop = done + next(sizes)
            parts.append(self.attend(rows.part(slice(done, stop)), done))
            done = stop
        return np.concatenate(parts)


def call(shape: Shape) -> AttentionCall:
    sinks = np.linspace(-2, 3, shape.heads, dtype=np.float32) if shape.sinks else None
    return AttentionCall(0, shape.heads, shape.key_dim**-0.5, shape.window, sinks)


def expected(cache: Cache, dtype: KvDtype, rows: Rows) -> F32:
    """What `reference` says."""
    asked = call(cache.shape)
    given = [None if x is None else REFERENCE.vector(x) for x in (rows.q, rows.k, rows.v)]
    sinks = None if asked.sinks is None else REFERENCE.vector(asked.sinks)
    kv = REFERENCE.kv_cache(cache.shape.spec(dtype), len(cache.pages))
    theirs = AttentionCall(0, asked.heads, asked.scale, asked.window, sinks)
    return REFERENCE.to_numpy(REFERENCE.attention(*given, kv, cache.batch(rows, 0), theirs))


@functools.lru_cache(maxsize=1)
def expected_of(shape: Shape, dtype: KvDtype, tokens: int) -> F32:
    """That of random rows: the same for every instruction set."""
    cache = Cache(CpuBackend(threads=1), shape, dtype, tokens)
    return expected(cache, dtype, Rows.random(shape, tokens))


def error(mine: F32, theirs: F32) -> float:
    """rms error relative to rms."""
    return float(np.sqrt(np.square(mine - theirs).mean() / np.square(theirs).mean()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_against_reference(isa: str, dtype: KvDtype, shape: Shape) -> None:
    tokens = 330  # more than a split, and no multiple of anything
    mine = Cache(CpuBackend(threads=2, isa_name=isa), shape, dtype, tokens).attend(Rows.random(shape, tokens))
    assert error(mine, expected_of(shape, dtype, tokens)) < BOUNDS[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[7], SHAPES[10], SHAPES[11]], ids=str)
def test_other_scales_against_reference(isa: str, dtype: KvDtype, shape: Shape) -> None:
    tokens = 150
    mine = Cache(CpuBackend(threads=2, isa_name=isa), shape, dtype, tokens).attend(Rows.random(shape, tokens))
    assert error(mine, expected_of(shape, dtype, tokens)) < BOUNDS[dtype]


@pytest.mark.parametrize("isa", ISAS)
def test_groups_as_large_as_a_head_are_the_heads_scale(isa: str) -> None:
    """The same codes and scales; what the scales multiply is rounded at another place."""
    shape = Shape(4, 2, 32, 32, 16)
    rows = Rows.random(shape, 90)
    backend = CpuBackend(threads=1, isa_name=isa)
    grouped, whole = Cache(backend, shape, "int8g32", 90), Cache(backend, shape, "int8", 90)
    np.testing.assert_allclose(grouped.attend(rows), whole.attend(rows), rtol=1e-4, atol=1e-6)
    assert all(np.array_equal(grouped.kv.page(i), whole.kv.page(i)) for i in range(grouped.kv.pages))


def test_finer_scales_lose_less_where_channels_differ() -> None:
    """Field report B: one channel 40 times as large as the others ruins its head, but only one of its groups.

    A scale per tensor is ruined by the largest head.
    """
    shape = Shape(8, 4, 128, 128, 32)
    rows = Rows.random(shape, 200)
    for array in (rows.k, rows.v):
        assert array is not None
        array.reshape(200, 4, 128)[:, 1, 7] *= 40
    rows.q.reshape(200, 8, 128)[:, :, 7] /= 40  # or softmax would see nothing else
    backend = CpuBackend(threads=2)
    truth = Cache(backend, shape, "f32", 200).attend(rows).reshape(200, 8, 128)
    small = np.arange(128) != 7

    def lost(dtype: KvDtype) -> float:
        mine = Cache(backend, shape, dtype, 200).attend(rows).reshape(200, 8, 128)
        return error(mine[:, :, small], truth[:, :, small])

    losses = [lost(dtype) for dtype in ("int8", "int8g64", "int8g32")]
    assert losses == sorted(losses, reverse=True) and losses[2] < 0.8 * losses[0]


@pytest.mark.parametrize("isa", ISAS)
def test_what_exceeds_the_tensors_scale_is_clipped(isa: str) -> None:
    """A single token attends to itself alone: the output is its value as the cache holds it."""
    shape = Shape(1, 1, 32, 32, 8)
    rows = Rows.random(shape, 1)
    assert rows.v is not None
    rows.v[:] = np.linspace(-8, 8, 32, dtype=np.float32)
    rows.v[0, :2] = -1e30, 1e30
    mine = Cache(CpuBackend(threads=1, isa_name=isa), shape, "int8t", 1).attend(rows)
    np.testing.assert_allclose(mine, np.clip(rows.v, -5, 5), atol=0.51 * 5 / 127)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sharpness", [0.02, 1.0, 8.0, 30.0], ids=["flat", "plain", "peaked", "one-token"])
@pytest.mark.parametrize("outliers", [False, True])
def test_int8_error_whatever_the_distribution(isa: str, sharpness: float, outliers: bool) -> None:
    """Integer products add less than a fiftieth of what int8 keys and values cost in any case.

    Outliers: channels of a query 30 times as large as the others, which take precision from them.
    """
    shape = Shape(16, 2, 128, 128, 32, sinks=True)
    rows = Rows.random(shape, 300, sharpness=sharpness)
    if outliers:
        rows.q.reshape(-1, 128)[:, [3, 77]] *= 30
        rows.k.reshape(-1, 128)[:, [3, 77]] *= np.array([0.01, 0.1], np.float32)
    cache = Cache(CpuBackend(threads=2, isa_name=isa), shape, "int8", 300)
    theirs = expected(cache, "int8", rows)
    added = error(cache.attend(rows), theirs)
    assert added < 0.02 * error(
        theirs, expected(cache, "f32", rows)
    )  # measured: 0.015, 0.005 without outliers
    assert outliers or added < BOUNDS["int8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_nothing_but_the_tokens(dtype: KvDtype, shape: Shape) -> None:
    """Instruction sets, threads, how a prompt is cut into steps: whole tiles and split ones join alike."""
    tokens = (
        530 if shape.key_dim < 576 else 350
    )  # two splits of 256 tokens and a part of a third, or of a second
    rows = Rows.random(shape, tokens)
    results = []
    for isa in ISAS:
        for threads in (1, 3):
            backend = CpuBackend(threads=threads, isa_name=isa, cpus=[0, 0, 0][:threads])
            results.append(Cache(backend, shape, dtype, tokens).attend(rows))
    steps = Cache(CpuBackend(threads=2), shape, dtype, tokens)
    results.append(steps.chunks(rows, iter([1, 37, 300, 1, 10, 1, 350])))
    assert all(np.array_equal(result, results[0]) for result in results)
    assert np.isfinite(results[0]).all()


def test_a_decode_too_deep_for_one_wave_of_splits() -> None:
    """Splits of 32 heads x 512 elements: 16 MB hold those of 65,536 tokens; here are 70,000, on two waves."""
    deep, chunk = 70_000, 5_000
    cheap = Shape(1, 1, 576, 512, 64, window=1)
    shape = Shape(32, 1, 576, 512, 64)
    caches = [Cache(CpuBackend(threads=n, cpus=[0] * n), cheap, "int8", deep + 1) for n in (1, 3)]
    for start in range(0, deep, chunk):
        rows = Rows.random(cheap, chunk, seed=start)
        for cache in caches:
            cache.attend(rows, start)
    results = []
    for cache in caches:
        cache.shape = shape
        results.append(cache.attend(Rows.random(shape, 1, seed=3), deep))
    assert np.array_equal(*results)
    assert 0 < np.abs(results[0]).max() < 1  # the mean of many normal numbers


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[9]], ids=str)
def test_what_a_page_held_before_does_not_matter(isa: str, dtype: KvDtype, shape: Shape) -> None:
    """Not even NaN: 0 * NaN would be NaN. A page of one request becomes another's."""
    backend = CpuBackend(threads=2, isa_name=isa)
    used, fresh = (Cache(backend, shape, dtype, 100) for _ in range(2))
    poison = Rows.random(shape, 100)
    for array in (poison.k, poison.v):
        if array is not None:
            array[:] = np.nan
    assert np.isnan(used.attend(poison)).all()
    for tokens in (1, 2, 7, 45):  # ends inside an octet, inside a lane of bf16, inside a block
        rows = Rows.random(shape, tokens, seed=tokens)
        assert np.array_equal(used.attend(rows), fresh.attend(rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_infinity_are_not_hidden(isa: str, dtype: KvDtype, value: float, where: str) -> None:
    """An int8 code has no NaN; the scale carries it, for the engine to see it in the logits."""
    shape = SHAPES[4]
    rows = Rows.random(shape, 20)
    rows.q[19, 5] = 1.0  # not negative: a score of -inf is a weight of 0, and rightly so
    getattr(rows, where)[19, 5] = value
    last = Cache(CpuBackend(threads=1, isa_name=isa), shape, dtype, 20).attend(rows)[19]
    mine = last.reshape(shape.heads, shape.value_dim)[0]
    assert not np.isfinite(mine).all()


@pytest.mark.parametrize("isa", ISAS)
def test_vectors_of_zeros_and_of_tiny_numbers(isa: str) -> None:
    shape = SHAPES[4]
    for factor in (0.0, 1e-38, 1e-44):
        rows = Rows.random(shape, 70)
        small = Rows(rows.q * np.float32(factor), rows.k * np.float32(factor), rows.v)
        result = Cache(CpuBackend(threads=1, isa_name=isa), shape, "int8", 70).attend(small)
        mean = small.v.reshape(70, 2, 128)[:, 0].mean(axis=0)  # type: ignore[union-attr]
        np.testing.assert_allclose(result[69, :128], mean, atol=0.01)
