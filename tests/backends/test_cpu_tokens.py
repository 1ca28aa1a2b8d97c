"""The CPU backend's token ops against `reference`: norms, heads, router, KV cache, attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.backends.base import AttentionCall, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.cpu_tokens import RopeCache
from strata.backends.reference import ReferenceBackend
from strata.backends.rope import rope_tables
from strata.core import Batch, Sequence
from strata.plan.spec import AttentionSpec, RopeSpec, RouterSpec

CPU = CpuBackend(threads=2)
REFERENCE = ReferenceBackend()
ROPE = RopeSpec("default", 10000.0, 64)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dim", [8, 64, 100, 2880])
def test_norms(rows: int, dim: int) -> None:
    x, weight = normal(1, rows, dim), normal(3, dim)
    close(CPU.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(ref(x), ref(weight), 1e-6), 2e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_adding_a_branch(rows: int) -> None:
    mine, branch = normal(1, rows, 100), normal(2, rows, 100)
    theirs = ref(mine)
    CPU.add(mine, branch, 0.22)
    REFERENCE.add(theirs, ref(branch), 0.22)
    close(mine, theirs, 1e-6)


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_sigmoid_gate(rows: int) -> None:
    """Also far from zero, where the exponential overflows."""
    x, gate = normal(1, rows, 33), normal(2, rows, 1) * 100
    close(CPU.scaled_by_sigmoid(x, gate), ref(x) * ref(gate).sigmoid(), 1e-6)


def test_no_rows_are_no_error() -> None:
    empty, weight = np.empty((0, 64), np.float32), normal(3, 64)
    assert CPU.rms_norm(empty, weight, 1e-6).shape == (0, 64)
    assert CPU.plain_linear(empty, normal(1, 8, 64)).shape == (0, 8)


@pytest.mark.parametrize("norm_width", [0, 128, 4 * 128])
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 32, 128])
def test_prepare_heads(norm_width: int, clip: float | None, interleaved: bool, rotary_dim: int) -> None:
    rope = replace(ROPE, rotary_dim=rotary_dim, interleaved=interleaved and rotary_dim == 128)
    spec = AttentionSpec(4, 4, 128, 1.0, rope, clip_qkv=clip)
    x, positions = normal(4, 9, 512), np.arange(1000, 1009, dtype=np.int32)
    norm = normal(5, norm_width) if norm_width else None
    mine = CPU.prepare_heads(x.copy(), 4, positions, spec, norm, 1e-6)
    theirs = REFERENCE.prepare_heads(ref(x), 4, positions, spec, ref_or_none(norm), 1e-6)
    if (
        rope.interleaved
    ):  # the CPU leaves the turned pairs in halves; queries and keys agree, so only q.k counts
        theirs = theirs.reshape(9, 4, 64, 2).transpose(2, 3).reshape(9, 512)
    close(mine, theirs, 3e-6)


RUNS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(RUNS, st.booleans()), min_size=1, max_size=6))
def test_kept_tables_are_those_of_the_positions(steps: list[tuple[list[tuple[int, int]], bool]]) -> None:
    """Steps of one and of several requests, long and short, at any depth; two models in turn."""
    cache, none = RopeCache(), np.arange(0, dtype=np.int32)
    other = replace(ROPE, rotary_dim=16, theta=500.0)
    for runs, second in steps:
        firsts = np.cumsum([0, *(count for _, count in runs)]).tolist()
        sequences = (Sequence(row, n, at, none) for row, (at, n) in zip(firsts, runs, strict=False))
        positions = np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in runs])
        rope = other if second else ROPE
        found = cache.of(rope, Batch(positions, positions, tuple(sequences), none))
        for mine, theirs in zip(found, rope_tables(rope, positions), strict=True):
            assert np.array_equal(mine, theirs)


def test_kept_tables_do_not_grow_for_ever() -> None:
    cache, none = RopeCache(), np.arange(0, dtype=np.int32)
    for start in range(0, 100 * 1000, 64):
        at = np.array([start], np.int32)
        cache.of(ROPE, Batch(at, at, (Sequence(0, 1, start, none),), none))
    kept = cache._kept[ROPE]
    assert len(kept) <= 256 and sum(cos.nbytes + sin.nbytes for cos, sin in kept.values()) < 13_000_000


ROUTERS = [
    RouterSpec(8, 1, "softmax", normalize=False),
    RouterSpec(128, 8, "softmax", normalize=True),
    RouterSpec(64, 8, "softmax", normalize=False, scale=2.5),
    RouterSpec(32, 4, "softmax_topk", normalize=False),
    RouterSpec(64, 6, "softmax", normalize=False, groups=8, top_groups=3, group_score="max", scale=16.0),
    RouterSpec(
        256, 8, "sigmoid", True, 1e-20, 2.5, select_bias=True, groups=8, top_groups=4, group_score="top2"
    ),
    RouterSpec(8, 8, "sigmoid", True, select_bias=True),
]


@pytest.mark.parametrize("spec", ROUTERS, ids=lambda s: f"{s.score}-{s.experts}-{s.top_k}-{s.groups}")
@pytest.mark.parametrize("rows", [1, 40])
def test_route(spec: RouterSpec, rows: int) -> None:
    """case-43: the same experts in the same order, weights to 1e-6; the correction bias never weighs."""
    logits = normal(6, rows, spec.experts) * 3
    bias = normal(7, spec.experts) if spec.select_bias else None
    ids, weights = CPU.route(logits, spec, bias)
    their_ids, their_weights = REFERENCE.route(ref(logits), spec, ref_or_none(bias))
    assert np.array_equal(ids, their_ids)
    np.testing.assert_allclose(weights, their_weights, rtol=1e-6, atol=1e-7)


def test_route_ties_go_to_the_lowest_index() -> None:
    """case-43: equal logits."""
    ids, weights = CPU.route(np.zeros((2, 64), np.float32), RouterSpec(64, 4), None)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_allclose(weights, 0.25)


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
def test_plain_linear_does_not_depend_on_batch_mates(rows: int) -> None:
    x, matrix, bias = normal(8, rows, 100), normal(9, 37, 100), normal(10, 37)
    together = CPU.plain_linear(x, matrix, bias)
    close(together, REFERENCE.plain_linear(ref(x), ref(matrix), ref(bias)), 1e-5)
    alone = np.concatenate([CPU.plain_linear(row[None], matrix, bias) for row in x])
    assert np.array_equal(together, alone)


class Pair:
    """One attention problem on both backends, same pages, fed step by step."""

    def __init__(
        self, spec: KvSpec, heads: int, window: int = 0, sinks: bool = False, threads: int = 2
    ) -> None:
        self.spec, self.heads = spec, heads
        self.cpu = CPU if threads == 2 else CpuBackend(threads=threads)
        self.caches = (self.cpu.kv_cache(spec, 64), REFERENCE.kv_cache(spec, 64))
        self.call = AttentionCall(spec.layers - 1, heads, spec.key_dim**-0.5, window)
        self.sinks = normal(11, heads) if sinks else None

    def step(self, seed: int, chunks: list[tuple[int, int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        """chunks: (start, count, pages) of each sequence."""
        rows, sequences = 0, []
        for start, count, pages in chunks:
            sequences.append(Sequence(rows, count, start, np.array(pages, np.int32)))
            rows += count
        batch = Batch(
            np.zeros(rows, np.int32), np.zeros(rows, np.int32), tuple(sequences), np.arange(0, dtype=np.int32)
        )
        spec = self.spec
        q = normal(seed, rows, self.heads * spec.key_dim)
        k = normal(seed + 1, rows, spec.kv_heads * spec.key_dim)
        v = None if spec.value_in_key else normal(seed + 2, rows, spec.kv_heads * spec.value_dim)
        mine = self.cpu.attention(q, k, v, self.caches[0], batch, replace(self.call, sinks=self.sinks))
        call = replace(self.call, sinks=ref_or_none(self.sinks))
        theirs = REFERENCE.attention(
            ref(q), ref(k), None if v is None else ref(v), self.caches[1], batch, call
        )
        return mine, theirs.numpy()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    "shape", [(8, 2, 64, 64), (4, 4, 40, 24), (6, 1, 576, 512)], ids=["gqa", "odd", "mla"]
)
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (20, True)])
def test_attention(dtype: str, shape: tuple[int, int, int, int], window: int, sinks: bool) -> None:
    heads, kv_heads, key_dim, value_dim = shape
    spec = KvSpec(2, kv_heads, key_dim, value_dim, 16, dtype, value_in_key=key_dim == 576)  # type: ignore[arg-type]
    pair = Pair(spec, heads, window, sinks)
    tolerance = 3e-3 if dtype == "int8" else 3e-5  # a value on the edge may round the other way: one step
    first, second = [5, 3, 60, 1], [2, 0, 7, 9]
    for seed, chunks in (
        (20, [(0, 37, first)]),
        (30, [(37, 1, first), (0, 20, second)]),
        (40, [(38, 9, first), (20, 1, second)]),
        (50, [(47, 1, first), (21, 1, second)]),
    ):
        mine, theirs = pair.step(seed, chunks)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


def test_deep_decode_is_split_and_joined() -> None:
    spec = KvSpec(1, 1, 32, 32, 64, "f32")
    pair = Pair(spec, 2)
    pages = list(range(64))
    pair.step(60, [(0, 3000, pages)])
    mine, theirs = pair.step(70, [(3000, 1, pages)])
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_attention_depends_on_neither_threads_nor_batch_mates() -> None:
    spec = KvSpec(1, 2, 64, 64, 32, "int8")
    results = []
    for threads in (1, 2):
        pair = Pair(spec, 4, threads=threads)
        pair.step(80, [(0, 50, [0, 1])])
        alone, _ = pair.step(90, [(50, 1, [0, 1])])
        results.append(alone)
        # The first row's numbers come first from the same seed, whatever follows; position 50 is rewritten.
        together, _ = pair.step(90, [(50, 1, [0, 1]), (0, 40, [2, 3])])
        results.append(together[:1])
    assert all(np.array_equal(result, results[0]) for result in results)


def peak_bytes() -> int:
    """Peak resident memory of this process since it was last reset by `5` in clear_refs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_deep_prefill_keeps_few_partial_results_and_changes_no_bit() -> None:
    """40 MB of partial softmax results pass through 16 MB; a row of the chunk is what it is alone."""
    spec, heads, before, rows = KvSpec(1, 1, 128, 128, 64, "int8"), 64, 4864, 256
    cache, pages = CPU.kv_cache(spec, 80), np.arange(80, dtype=np.int32)
    old = [normal(seed, before, 128) for seed in (1, 2, 3)]  # one head will do to fill the cache
    CPU.attention(*old, cache, one_sequence(before, 0, pages), AttentionCall(0, 1, 0.1))
    q, k, v = (normal(seed, rows, n * 128) for seed, n in ((4, heads), (5, 1), (6, 1)))
    call = AttentionCall(0, heads, 0.1)
    Path("/proc/self/clear_refs").write_text("5")
    peak = peak_bytes()
    together = CPU.attention(q, k, v, cache, one_sequence(rows, before, pages), call)
    assert peak_bytes() - peak < 36_000_000  # 8 MB are the result itself
    for row in (0, rows - 1):
        part = slice(row, row + 1)
        alone = CPU.attention(q[part], k[part], v[part], cache, one_sequence(1, before + row, pages), call)
        assert np.array_equal(alone, together[part])


def one_sequence(rows: int, start: int, pages: np.ndarray) -> Batch:
    positions = np.arange(start, start + rows, dtype=np.int32)
    return Batch(positions, positions, (Sequence(0, rows, start, pages),), np.arange(0, dtype=np.int32))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([0, 1, 5, 33]))
def test_any_chunking_gives_what_reference_gives(chunks: list[int], window: int) -> None:
    pair = Pair(KvSpec(1, 2, 16, 16, 8, "f32"), 4, window)
    start = 0
    for index, count in enumerate(chunks):
        mine, theirs = pair.step(100 + 3 * index, [(start, count, list(range(40)))])
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
        start += count


def test_wrong_pages_are_refused() -> None:
    pair = Pair(KvSpec(1, 2, 16, 16, 8, "f32"), 4)
    with pytest.raises(ValueError, match="page id is"):
        pair.step(1, [(0, 3, [64])])
    with pytest.raises(ValueError, match="start of a sequence in the tokens of its pages is 8, expected 8"):
        pair.step(1, [(8, 3, [0])])


def ref(x: np.ndarray):  # type: ignore[no-untyped-def]
    return REFERENCE.vector(x)


def ref_or_none(x: np.ndarray | None):  # type: ignore[no-untyped-def]
    return None if x is None else ref(x)


def close(mine: np.ndarray, theirs, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    np.testing.assert_allclose(mine, theirs.numpy(), rtol=tolerance, atol=tolerance)
