"""The CPU backend's ops on packed weights: linear, head, embedding, dense FFN, routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.handles import Handles
from strata.backends.parts import ExpertBank, Gating
from strata.store.formats import ExpertLayout, PackedTensor

F32 = NDArray[np.float32]


class CpuWeight:
    """A handle on a packed matrix; keeps a view of the bytes, which normally are the mapped shard."""

    def __init__(self, tensor: PackedTensor, extension: ModuleType) -> None:
        shape = tensor.shape
        data = np.ascontiguousarray(tensor.data)
        self.name = tensor.name
        self.rows, self.cols = shape.rows, shape.cols
        self.packed = extension.PackedMatrix(data, shape.format.code, shape.rows, shape.cols)


class WeightOps:
    """Part of CpuBackend. Shapes are checked by the extension, whose ValueErrors name both numbers.

    Order of additions, for every op: fixed per output element, independent of threads and of the other
    rows of the batch, so a row's result is the same bits alone and in any batch.
    """

    ops: ModuleType
    cpu: Any
    exact: bool
    """Whether activations stay f32."""

    def __init__(self) -> None:
        super().__init__()
        self._handles = Handles()

    def weight(self, tensor: PackedTensor) -> CpuWeight:
        """A handle that keeps a view of `tensor.data`."""
        return CpuWeight(tensor, self.ops)

    def embedding(self, weight: CpuWeight, token_ids: NDArray[np.int32], scale: float) -> F32:
        """Rows of the embedding, times scale."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        found: F32 = self.ops.embedding(self.cpu, weight.packed, ids, scale)
        return found

    def linear(self, x: F32, weight: CpuWeight, bias: F32 | None = None) -> F32:
        """x W^T + bias."""
        result: F32 = self.ops.linear(self.cpu, weight.packed, _f32(x), bias, self.exact)
        return result

    def head_linear(self, x: F32, weight: CpuWeight, heads: int) -> F32:
        """One small matrix per head."""
        result: F32 = self.ops.head_linear(self.cpu, weight.packed, _f32(x), heads, self.exact)
        return result

    def ffn(self, x: F32, gate_up: CpuWeight, down: CpuWeight, width: int, gating: Gating) -> F32:
        """Dense gated FFN."""
        if width != down.cols:
            raise ValueError(f"ffn: width {width}, columns of down {down.cols}")
        kind = as_gating(self.ops, gating)
        result: F32 = self.ops.ffn(self.cpu, _f32(x), gate_up.packed, down.packed, kind, self.exact)
        return result

    def experts(
        self,
        x: F32,
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        bank: ExpertBank,
        gating: Gating,
        active: Sequence[int] | None = None,
    ) -> F32:
        """Routed experts in ascending order of their index, slice after slice."""
        kind = as_gating(self.ops, gating)
        chosen = np.ascontiguousarray(ids, dtype=np.int32)
        result: F32 = self.ops.experts(
            self.cpu, _f32(x), chosen, _f32(weights), self._table(bank), kind, self.exact, active
        )
        return result

    def _table(self, bank: ExpertBank) -> Any:
        """The bank's records as C++ keeps them; each is asked for when it is first needed."""
        return self._handles.of(bank, self._make_table)

    def _make_table(self, bank: ExpertBank) -> Any:
        record = bank.placed or bank.record
        shape = as_record_shape(self.ops, bank.layout)
        return self.ops.ExpertTable(shape, bank.count, record, copies=bank.copies)


def _f32(x: NDArray[Any]) -> F32:
    return np.ascontiguousarray(x, dtype=np.float32)


@lru_cache(maxsize=64)
def as_gating(extension: ModuleType, gating: Gating) -> Any:
    """The activation as C++ knows it."""
    return extension.Gating(gating.kind, gating.alpha, gating.limit)


@lru_cache(maxsize=64)
def as_record_shape(extension: ModuleType, layout: ExpertLayout) -> Any:
    """The layout's numbers as C++ knows them, checked there against its own arithmetic."""
    return extension.RecordShape(
        gate_up_code=layout.gate_up_format.code,
        down_code=layout.down_format.code,
        hidden=layout.hidden,
        slice_width=layout.slice_width,
        slices=layout.slices,
        slice_bytes=layout.slice_bytes,
        down_offset=layout.down_offset(0),
        gate_up_bias_offset=layout.gate_up_bias_offset,
        down_bias_offset=layout.down_bias_offset,
        record_bytes=layout.record_bytes,
        biases=layout.biases,
    )
