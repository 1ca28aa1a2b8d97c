"""The CPU backend's ops on tokens: norms, heads, router, KV cache and attention (C++ in csrc/cpu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import BestLogits, KvSpec
from strata.backends.cpu_kv import CpuKvCache
from strata.backends.parts import AttentionCall
from strata.backends.rope import rope_tables
from strata.core import Batch
from strata.plan.spec import AttentionSpec, RopeSpec, RouterSpec

F32 = NDArray[np.float32]


Tables = tuple[F32, F32]

_BLOCK, _LONGEST = 64, 32
"""Positions of a kept block, and rows of one request that are taken from it: it has so many more positions,
so that they never lie in two."""
_MOST_BLOCKS = 256
"""Of one model; 12 MB of 128 rotated elements."""


class RopeCache:
    """Tables of rotation, cos and sin f32 [rows, rotary_dim / 2], that somebody may want again.

    Those of a step of few rows are parts of kept blocks of positions: the next steps go on from there. Of
    others, those of the batch at hand: every layer, queries and keys alike, rotates with the same ones.
    """

    def __init__(self) -> None:
        self._positions = b""
        self._tables: dict[RopeSpec, Tables] = {}
        self._kept: dict[RopeSpec, dict[int, Tables]] = {}
        self._latest: tuple[RopeSpec, dict[int, Tables]] | None = None  # to hash it takes as long as the rest

    def of(self, rope: RopeSpec, batch: Batch) -> Tables:
        """Of the batch's rows."""
        sequences = batch.sequences
        if not 0 < batch.rows <= _BLOCK or any(part.count > _LONGEST for part in sequences):
            return self.tables(rope, batch.positions)
        if len(sequences) == 1:
            return self._run(rope, sequences[0].start, sequences[0].count)
        parts = [self._run(rope, part.start, part.count) for part in sequences]
        return np.concatenate([cos for cos, _ in parts]), np.concatenate([sin for _, sin in parts])

    def _run(self, rope: RopeSpec, start: int, count: int) -> Tables:
        """Of positions [start, start + count), _LONGEST at most."""
        if self._latest is None or self._latest[0] is not rope:
            self._latest = rope, self._kept.setdefault(rope, {})
        blocks = self._latest[1]
        number, first = divmod(start, _BLOCK)
        if number not in blocks:
            if len(blocks) >= _MOST_BLOCKS:
                blocks.clear()
            begin = number * _BLOCK
            blocks[number] = rope_tables(rope, np.arange(begin, begin + _BLOCK + _LONGEST, dtype=np.int32))
        cosines, sines = blocks[number]
        return cosines[first : first + count], sines[first : first + count]

    def tables(self, rope: RopeSpec, positions: NDArray[np.int32]) -> Tables:
        """Of rows at these positions."""
        if positions.tobytes() != self._positions:
            self._positions = positions.tobytes()
            self._tables.clear()
        if rope not in self._tables:
            self._tables[rope] = rope_tables(rope, positions)
        return self._tables[rope]


class TokenOps:
    """The part of `CpuBackend` that works on tokens. `ops` is strata._C, `cpu` its threads and scratch.

    nodes: where KV pages shall lie when there is more than one memory node; () = anywhere.
    """

    ops: Any
    cpu: Any
    nodes: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self._rope = RopeCache()
        self._sequences: tuple[Batch, list[Any]] | None = None

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Root-mean-square norm over groups of len(weight) columns."""
        y = np.empty_like(x)
        self.ops.rms_norm(self.cpu, x, weight, y, eps)
        return y

    def add(self, residual: F32, branch: F32, scale: float = 1.0) -> None:
        """residual += scale * branch, each sum rounded once."""
        self.ops.add(self.cpu, residual, branch, scale)

    def scaled_by_sigmoid(self, x: F32, gate: F32) -> F32:
        """x * sigmoid(gate)."""
        scaled = x.copy()
        self.ops.scale_by_sigmoid(self.cpu, scaled, gate)
        return scaled

    def plain_linear(self, x: F32, matrix: F32, bias: F32 | None = None) -> F32:
        """x W^T + bias in f32; independent of the number of rows, unlike a BLAS."""
        y = np.empty((len(x), len(matrix)), np.float32)
        self.ops.plain_linear(self.cpu, x, matrix, bias, y)
        return y

    def prepare_heads(
        self,
        x: F32,
        heads: int,
        positions: NDArray[np.int32],
        spec: AttentionSpec,
        norm: F32 | None,
        eps: float,
    ) -> F32:
        """Norm, clip, rotate; in place."""
        cosines, sines = self._rope.tables(spec.rope, positions)
        self.ops.prepare_heads(
            self.cpu, x, heads, norm, eps, spec.clip_qkv, cosines, sines, spec.rope.interleaved
        )
        return x

    def kv_cache(self, spec: KvSpec, pages: int) -> CpuKvCache:
        """Storage for `pages` pages; page_tokens must be a multiple of 8."""
        return CpuKvCache.allocate(self.ops, spec, pages, self.nodes)

    def copy_pages(self, cache: CpuKvCache, copies: Sequence[tuple[int, int]]) -> None:
        """One after the other."""
        for source, target in copies:
            cache.copy_page(source, target)

    def attention(
        self, q: F32, k: F32, v: F32 | None, cache: CpuKvCache, batch: Batch, call: AttentionCall
    ) -> F32:
        """Append k and v, then causal attention."""
        out = np.empty((batch.rows, call.heads * cache.spec.value_dim), np.float32)
        sequences = self._sequences_of(batch)
        self.ops.attention(
            self.cpu,
            cache.handle,
            call.layer,
            sequences,
            q,
            k,
            v,
            call.heads,
            call.scale,
            call.window,
            call.sinks,
            out,
        )
        return out

    def best_logits(self, logits: F32, count: int, columns: int) -> BestLogits | None:
        """The `count` best of the first `columns` of each row."""
        found = self.ops.best_logits(self.cpu, logits, columns, count)
        return None if found is None else BestLogits(*found)

    def route(
        self, logits: F32, spec: RouterSpec, select_bias: F32 | None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Expert ids and weights, best expert first, ties to the lowest index."""
        ids = np.empty((len(logits), spec.top_k), np.int32)
        weights = np.empty((len(logits), spec.top_k), np.float32)
        self.ops.route(self.cpu, logits, spec, select_bias, ids, weights)
        return ids, weights

    def _sequences_of(self, batch: Batch) -> list[Any]:
        """The batch's sequences for C++, made once per batch and not once per layer."""
        if self._sequences is None or self._sequences[0] is not batch:
            made = [
                self.ops.Sequence(s.first_row, s.count, s.start, np.ascontiguousarray(s.pages, np.int32))
                for s in batch.sequences
            ]
            self._sequences = (batch, made)
        return self._sequences[1]
