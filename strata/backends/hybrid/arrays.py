"""What the hybrid backend computes with: matrices on the device, and weights that go there on first use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu_weights import CpuWeight
from strata.device.base import Buffer
from strata.store.formats import PackedShape, PackedTensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """`[rows, cols]` numbers of 4 bytes (f32; i32 where an op says so), row after row. It owns nothing: what
    an op returned is valid until the scope of the workspace ends that it was made in."""

    buffer: Buffer
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.rows, self.cols


class Vector:
    """A plain vector or matrix of the model: f32 `values` on the host, on the device once `matrix` is set."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values
        self.matrix: Matrix | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on either side."""
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)


class HybridWeight:
    """A packed matrix: on the host as the CPU backend's handle, on the device once `buffer` is set."""

    def __init__(self, tensor: PackedTensor, host: CpuWeight) -> None:
        self.tensor = tensor
        self.host = host
        self.buffer: Buffer | None = None

    @property
    def shape(self) -> PackedShape:
        """Of the packed bytes."""
        return self.tensor.shape

    @property
    def rows(self) -> int:
        """Outputs of the product."""
        return self.tensor.shape.rows

    @property
    def cols(self) -> int:
        """Inputs of the product."""
        return self.tensor.shape.cols


@dataclass(frozen=True, slots=True)
class PackedOnDevice:
    """A packed matrix in device memory, as kernels get it."""

    buffer: Buffer
    shape: PackedShape


@dataclass(frozen=True, slots=True)
class DeviceRoutes:
    """A router's choice in device memory: ids i32 and weights f32, both `[rows, top_k]`."""

    ids: Matrix
    weights: Matrix


@dataclass(frozen=True, slots=True)
class DraftTables:
    """Drafts to verify, in device memory, as csrc/cuda/verify_draft.cu reads them.

    settings f32 `[sequences, 4]`; draft i32 and numbers f32, one per row; first_row i32 `[sequences + 1]`.
    """

    settings: Matrix
    draft: Matrix
    numbers: Matrix
    first_row: Matrix


def require(op: str, what: str, value: int, other: str, wanted: int) -> None:
    """Shape check at the border of an op; ValueError names both numbers."""
    if value != wanted:
        raise ValueError(f"{op}: {what} {value}, {other} {wanted}")
