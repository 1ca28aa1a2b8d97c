"""The ground truth: every op in plain torch, slow and obviously right.

Matrices are dequantized to f32 (or f64) when first used. Every row is computed by itself, with operations
whose shape depends on that row's request alone: a result never depends, not even in its last bit, on
which other requests share the batch or how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.backends import reference_attention, reference_router
from strata.backends.base import KV_DTYPES, KvSpec
from strata.backends.composed import ComposedOps
from strata.backends.parts import AttentionCall, ExpertBank, Gating
from strata.backends.reference_attention import PagedKv
from strata.backends.reference_ffn import GatedFfn, expert_of, plus
from strata.backends.rope import rope_tables
from strata.core import Batch
from strata.plan.spec import AttentionSpec, RopeSpec, RouterSpec
from strata.store.formats import FORMATS, PackedTensor
from strata.store.pack import unpack

_PACKED_OPS = ("weight", "embedding", "linear", "head_linear", "ffn", "experts")


class ReferenceWeight:
    """A packed matrix and, once used, its dequantized values."""

    def __init__(self, tensor: PackedTensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.rows, self.cols = tensor.shape.rows, tensor.shape.cols
        self.dtype = dtype

    @cached_property
    def matrix(self) -> Tensor:
        """`[rows, cols]` in the backend's dtype."""
        return torch.from_numpy(unpack(self.tensor)).to(self.dtype)


class ReferenceBackend(ComposedOps):
    """See `base.Backend` for what each op does; `dtype` float64 serves as the judge of f32 results."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> None:
        """threads: torch's for the whole process; None leaves them as they are."""
        self.dtype = dtype
        if threads is not None:
            torch.set_num_threads(threads)

    def supports(self, op: str, fmt: str) -> bool:
        """Every op with every format."""
        if op in ("kv_cache", "attention"):
            return fmt in KV_DTYPES
        return op in _PACKED_OPS and fmt in FORMATS

    def weight(self, tensor: PackedTensor) -> ReferenceWeight:
        """A handle that keeps a view of the bytes and dequantizes on first use."""
        return ReferenceWeight(tensor, self.dtype)

    def vector(self, values: NDArray[Any]) -> Tensor:
        """A copy in the backend's dtype."""
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self.dtype)

    def embedding(self, weight: ReferenceWeight, token_ids: NDArray[np.int32], scale: float) -> Tensor:
        """Rows of the embedding, times scale."""
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= weight.rows:
            raise ValueError(f"embedding: token ids {low}..{high} but {weight.rows} rows")
        return weight.matrix[torch.from_numpy(token_ids.astype(np.int64))] * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over groups of len(weight) columns."""
        if x.shape[1] % len(weight):
            raise ValueError(f"rms_norm: {x.shape[1]} columns are no multiple of {len(weight)} weights")

        def normed(row: Tensor) -> Tensor:
            groups = row.view(-1, len(weight))
            return (groups * torch.rsqrt(groups.square().mean(dim=1, keepdim=True) + eps) * weight).flatten()

        return _by_rows(x, normed)

    def add(self, residual: Tensor, branch: Tensor, scale: float = 1.0) -> None:
        """residual += scale * branch."""
        if residual.shape != branch.shape:
            raise ValueError(f"add: residual {tuple(residual.shape)} but branch {tuple(branch.shape)}")
        residual += branch * scale

    def scaled_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate)."""
        return x * _by_rows(gate, torch.sigmoid)

    def linear(self, x: Tensor, weight: ReferenceWeight, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        _same("linear", "columns of x", x.shape[1], "columns of the weight", weight.cols)
        return plus(_by_rows(x, lambda row: torch.mv(weight.matrix, row)), bias)

    def plain_linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same with a plain matrix."""
        _same("plain_linear", "columns of x", x.shape[1], "columns of the matrix", matrix.shape[1])
        return plus(_by_rows(x, lambda row: torch.mv(matrix, row)), bias)

    def head_linear(self, x: Tensor, weight: ReferenceWeight, heads: int) -> Tensor:
        """One small matrix per head."""
        _same("head_linear", "columns of x", x.shape[1], "heads * columns of the weight", heads * weight.cols)
        matrices = weight.matrix.view(heads, -1, weight.cols)
        return _by_rows(x, lambda row: torch.bmm(matrices, row.view(heads, weight.cols, 1)).flatten())

    def take_rows(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        """x[rows]."""
        return x[torch.from_numpy(rows.astype(np.int64))]

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Column slices."""
        _same("split", "columns of x", x.shape[1], "sum of the sizes", sum(sizes))
        return list(torch.split(x, list(sizes), dim=1))

    def join_heads(self, parts: Sequence[Tensor], heads: int) -> Tensor:
        """Head h of the result is head h of every part, one after the other."""
        return torch.cat([part.reshape(len(part), heads, -1) for part in parts], dim=2).flatten(1)

    def split_heads(self, x: Tensor, heads: int, sizes: Sequence[int]) -> list[Tensor]:
        """Inverse of join_heads."""
        _same("split_heads", "columns of x", x.shape[1], "heads * sum of the sizes", heads * sum(sizes))
        parts = torch.split(x.reshape(len(x), heads, -1), list(sizes), dim=2)
        return [part.flatten(1) for part in parts]

    def prepare_heads(
        self,
        x: Tensor,
        heads: int,
        positions: NDArray[np.int32],
        spec: AttentionSpec,
        norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm, clip, rotate. The norm's length says whether it spans a head or all of them."""
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        if spec.clip_qkv is not None:
            x = x.clamp(-spec.clip_qkv, spec.clip_qkv)
        return self._rotate(x.reshape(len(x), heads, -1), positions, spec.rope).flatten(1)

    def _rotate(self, x: Tensor, positions: NDArray[np.int32], rope: RopeSpec) -> Tensor:
        """Rotate the leading rotary_dim elements of `[rows, heads, dim]`."""
        tables = rope_tables(rope, positions)
        cos, sin = (torch.from_numpy(table).to(self.dtype)[:, None, :] for table in tables)
        turned, rest = x[:, :, : rope.rotary_dim], x[:, :, rope.rotary_dim :]
        if rope.interleaved:
            a, b = turned[:, :, 0::2], turned[:, :, 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=3).flatten(2)
        else:
            a, b = turned.chunk(2, dim=2)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)
        return torch.cat([turned, rest], dim=2)

    def kv_cache(self, spec: KvSpec, pages: int) -> PagedKv:
        """Storage for `pages` pages; "f32" means unrounded, that is the backend's dtype."""
        return PagedKv(spec, pages, self.dtype)

    def copy_pages(self, cache: PagedKv, copies: Sequence[tuple[int, int]]) -> None:
        """One after the other."""
        for source, target in copies:
            cache.copy_page(source, target)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor | None, cache: PagedKv, batch: Batch, call: AttentionCall
    ) -> Tensor:
        """Paged causal attention."""
        kv = cache.spec
        _same("attention", "columns of q", q.shape[1], "heads * key_dim", call.heads * kv.key_dim)
        _same("attention", "columns of k", k.shape[1], "kv_heads * key_dim", kv.kv_heads * kv.key_dim)
        if (v is None) != kv.value_in_key:
            raise ValueError(f"attention: v given is {v is not None}, value_in_key is {kv.value_in_key}")
        return reference_attention.attention(q, k, v, cache, batch, call)

    def route(
        self, logits: Tensor, spec: RouterSpec, select_bias: Tensor | None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Expert ids and weights, best expert first, ties to the lowest index."""
        _same("route", "columns of the logits", logits.shape[1], "experts", spec.experts)
        chosen = [reference_router.route(row[None].clone(), spec, select_bias) for row in logits]
        ids = torch.cat([ids for ids, _ in chosen]).numpy().astype(np.int32)
        return ids, torch.cat([weights for _, weights in chosen]).numpy().astype(np.float32)

    def ffn(
        self, x: Tensor, gate_up: ReferenceWeight, down: ReferenceWeight, width: int, gating: Gating
    ) -> Tensor:
        """Dense gated FFN."""
        _same("ffn", "width", width, "columns of down", down.cols)
        dense = GatedFfn(gate_up.matrix, down.matrix)
        return _by_rows(x, lambda row: dense.apply(row, gating))

    def experts(
        self,
        x: Tensor,
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        bank: ExpertBank,
        gating: Gating,
        active: Sequence[int] | None = None,
    ) -> Tensor:
        """Every routed expert once, its tokens one by one; a token adds its experts in ascending order."""
        output = torch.zeros_like(x)
        for index in np.unique(ids) if active is None else active:
            expert = expert_of(bank.record(int(index)), bank.layout, self.dtype)
            for row, choice in zip(*np.nonzero(ids == index), strict=True):
                output[row] += float(weights[row, choice]) * expert.apply(x[row].clone(), gating)
        return output

    def to_numpy(self, x: Tensor) -> NDArray[np.float32]:
        """An f32 array; shares memory with an f32 tensor."""
        values: NDArray[np.float32] = x.to(torch.float32).numpy()
        return values


def _by_rows(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    """op of each row alone. It gets a copy: the last bits of a product may depend on its input's alignment,
    and those of exp on whether an element falls into the vectorized part of an array or into its tail."""
    return torch.stack([op(row.clone()) for row in x])


def _same(op: str, what: str, value: int, other: str, wanted: int) -> None:
    """Shape check at the border of an op."""
    if value != wanted:
        raise ValueError(f"{op}: {what} {value}, {other} {wanted}")
