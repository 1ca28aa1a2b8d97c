"""Gated FFNs in plain torch, and an expert's record taken apart into its matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.backends.parts import Gating
from strata.store.formats import ExpertLayout, PackedShape, PackedTensor
from strata.store.pack import unpack

INTERLEAVE = 8


@dataclass(frozen=True)
class GatedFfn:
    """One gated FFN or one slice of it.

    gate_up: interleaved, `[2 * padded width, hidden]`; down: `[hidden, width]`.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None

    def apply(self, x: Tensor, gating: Gating) -> Tensor:
        """One token `[hidden]` -> `[hidden]`."""
        gate, up = separate(plus(torch.mv(self.gate_up, x), self.gate_up_bias), self.down.shape[1])
        return torch.mv(self.down, gated(gate, up, gating))


@dataclass(frozen=True)
class Expert:
    """A routed expert: its slices' results add up."""

    slices: tuple[GatedFfn, ...]
    down_bias: Tensor | None

    def apply(self, x: Tensor, gating: Gating) -> Tensor:
        """One token `[hidden]` -> `[hidden]`."""
        parts = [part.apply(x, gating) for part in self.slices]
        return plus(torch.stack(parts).sum(dim=0), self.down_bias)


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias, where there is one."""
    return x if bias is None else x + bias


def gated(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """The activation between gate_up and down (see Gating)."""
    if gating.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if gating.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=gating.limit)
    up = up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gate * gating.alpha) * (up + 1)


def separate(gate_up: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Gate and up `[width]` out of 8 gate elements, 8 up elements, 8 gate ...; the padding falls away."""
    pairs = gate_up.view(-1, 2, INTERLEAVE)
    return pairs[:, 0].flatten()[:width], pairs[:, 1].flatten()[:width]


def expert_of(record: NDArray[np.uint8], layout: ExpertLayout, dtype: torch.dtype) -> Expert:
    """Dequantize an expert's record."""
    slices = tuple(_slice_of(record, layout, part, dtype) for part in range(layout.slices))
    if not layout.biases:
        return Expert(slices, None)
    return Expert(slices, _vector(record, layout.down_bias_offset, layout.hidden, dtype))


def _slice_of(record: NDArray[np.uint8], layout: ExpertLayout, part: int, dtype: torch.dtype) -> GatedFfn:
    gate_up = _matrix(record, layout.gate_up_offset(part), layout.gate_up, dtype)
    down = _matrix(record, layout.down_offset(part), layout.down, dtype)
    if not layout.biases:
        return GatedFfn(gate_up, down)
    rows = layout.gate_up.rows
    return GatedFfn(gate_up, down, _vector(record, layout.gate_up_bias_offset + part * rows * 4, rows, dtype))


def _matrix(record: NDArray[np.uint8], offset: int, shape: PackedShape, dtype: torch.dtype) -> Tensor:
    packed = PackedTensor("expert", shape, record[offset : offset + shape.nbytes])
    return torch.from_numpy(unpack(packed)).to(dtype)


def _vector(record: NDArray[np.uint8], offset: int, length: int, dtype: torch.dtype) -> Tensor:
    values = record[offset : offset + length * 4].copy().view(np.float32)
    return torch.from_numpy(values).to(dtype)
