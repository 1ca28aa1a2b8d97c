"""What the converter sees of a checkpoint, whatever file format it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. shape is row-major [.., rows, cols] (GGUF's order is reversed on read).

    dtype: "F32", "F16", "BF16", "F8_E4M3", "U8", "I32", ... or a GGUF block type such as "Q4_0", "Q6_K",
    "MXFP4". nbytes: bytes in the file. gpt-oss's pair `X_blocks` [.., groups, 16] + `X_scales` [.., groups]
    appears as one tensor X of dtype "MXFP4" and shape [.., groups * 32].
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True)
class QuantizedRows:
    """Rows in a quantized form that Strata stores without loss (or, `exact` False, see docs: Q4_K).

    format: a name from formats.FORMATS ("w4g32", "w4g32m", "w8g32", "mxfp4"). codes: u8 (int8 viewed as u8
    for w8g32) `[rows, cols]`, one value each; scales, minimums: `[rows, cols / group]`,
    fp16 (u8 E8M0 for mxfp4).
    """

    format: str
    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    minimums: NDArray[np.float16] | None = None
    exact: bool = True


class CheckpointSource(Protocol):
    """An opened checkpoint: headers read and checked, data mapped read-only."""

    path: Path
    kind: str  # "safetensors" or "gguf"
    config: Mapping[str, Any]  # config.json, or GGUF metadata (key -> value)
    tensors: Mapping[str, TensorInfo]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes exactly as in the file, a read-only view of the mapping."""
        ...

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a tensor flattened to 2-D [prod(shape[:-1]), cols], dequantized to f32.

        FP8 block-scaled weights are multiplied by their `weight_scale_inv`; 1-D tensors are one row.
        """
        ...

    def quantized(self, name: str, start: int, stop: int) -> QuantizedRows | None:
        """Rows [start, stop) with their quantization kept, where a WeightFormat holds it exactly.

        None for types that must be re-quantized from `rows` (Q5_K, Q6_K, FP8, floats).
        """
        ...

    def files(self) -> Sequence[Path]:
        """Every file that belongs to the checkpoint, for fingerprints."""
        ...


@dataclass(frozen=True)
class SourceRows:
    """A block of one source tensor, seen as 2-D `[prod(shape[:-1]), shape[-1]]`.

    Rows start:stop:stride and columns col_start:col_stop:col_stride are taken (stop None = to the end),
    then the block is transposed if asked (gpt-oss keeps `[experts, hidden, 2 * width]` in BF16), and then
    row_order, an index tuple, permutes its rows (GGUF's llama q/k un-permutation).
    Without transposition and with all columns the block can be copied without loss from quantized types.
    """

    name: str
    start: int = 0
    stop: int | None = None
    stride: int = 1
    col_start: int = 0
    col_stop: int | None = None
    col_stride: int = 1
    transposed: bool = False
    row_order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TargetTensor:
    """One tensor of the store and where its rows come from: the sources are stacked in order.

    name: see names.py. plain: stored as BF16/F32 without packing. kind decides the format option:
    "embed", "head", "shared" (attention, dense, shared experts) or "plain".
    interleave: the sources are (gate, up), to be interleaved in blocks of 8 rows.
    shape: logical shape after stacking ([rows, cols], or 1-D for plain vectors).
    """

    name: str
    sources: tuple[SourceRows, ...]
    shape: tuple[int, ...]
    kind: str
    interleave: bool = False


@dataclass(frozen=True)
class TargetExpert:
    """Where one routed expert's parts come from. Biases only where the model has them."""

    layer: int
    index: int
    gate: SourceRows
    up: SourceRows
    down: SourceRows
    gate_bias: SourceRows | None = None
    up_bias: SourceRows | None = None
    down_bias: SourceRows | None = None
