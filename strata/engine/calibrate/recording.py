"""The CPU backend, telling what its matrices read: every part of a layer in elementary ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strata.backends.composed import ComposedOps
from strata.backends.cpu import CpuBackend
from strata.backends.cpu_kv import CpuKvCache
from strata.backends.cpu_weights import CpuWeight
from strata.backends.parts import ExpertBank, Experts, Gating, GroupedQueryAttention, Routing
from strata.backends.reference_ffn import INTERLEAVE, gated
from strata.core import Batch
from strata.store.formats import ExpertLayout, PackedShape, PackedTensor

Floats = NDArray[np.float32]
Listener = Callable[[Floats], None]


class RecordingBackend(CpuBackend):
    """Computes as the CPU backend with f32 activations, and shows each input to who listens to its name."""

    # Fused ops would keep the inputs to themselves.
    attend = ComposedOps.attend
    feed_forward = ComposedOps.feed_forward
    choose_experts = ComposedOps.choose_experts

    def __init__(self, threads: int | None = None) -> None:
        """threads: of the matrices. torch's, of this process, become 1: its ops here are small, and on a busy
        machine its barriers took 4 ms each."""
        super().__init__(threads, "f32")
        torch.set_num_threads(1)
        self._listeners: dict[str, Listener] = {}

    @contextmanager
    def heard_by(self, listeners: Mapping[str, Listener]) -> Iterator[None]:
        """listeners: by the name of the matrix; for one with a matrix per head `NAME[h]`."""
        before, self._listeners = self._listeners, {**self._listeners, **listeners}
        try:
            yield
        finally:
            self._listeners = before

    def linear(self, x: Floats, weight: CpuWeight, bias: Floats | None = None) -> Floats:
        """x W^T + bias: f32 `[rows, cols]` -> `[rows, outputs]`."""
        self._tell(weight.name, x)
        return super().linear(x, weight, bias)

    def _grouped_query(
        self, hidden: Floats, part: GroupedQueryAttention, cache: CpuKvCache, batch: Batch
    ) -> Floats:
        """`[rows, hidden]` -> `[rows, heads * head_dim]`; tells what values read, too: see `values_input`."""
        qkv = self.linear(hidden, part.qkv, part.qkv_bias)
        q, k, v = self._heads(qkv, part, batch)
        name = part.qkv.name.removesuffix("qkv.weight") + "v"
        if name in self._listeners:
            self._tell(name, self._mixtures(hidden, q, k, part, cache, batch))
        found: Floats = self.attention(q, k, v, cache, batch, part.call)
        return found

    def _mixtures(
        self,
        hidden: Floats,
        q: Floats,
        k: Floats,
        part: GroupedQueryAttention,
        cache: CpuKvCache,
        batch: Batch,
    ) -> Floats:
        """What attention makes of hidden, `[value heads * rows, hidden]`: row i of each as head i modulo the
        number of heads that share it sees it. As many columns at a time as a value has stand in its place."""
        rows, width = hidden.shape
        kv, dim = part.spec.kv_heads, part.spec.head_dim
        chosen = np.arange(rows), slice(None), np.arange(rows) % (part.spec.heads // kv)
        found = np.empty((kv, rows, width), np.float32)
        for start in range(0, width, dim):
            stop = min(start + dim, width)
            values = np.zeros((rows, kv, dim), np.float32)
            values[:, :, : stop - start] = hidden[:, None, start:stop]
            mixed = self.attention(q, k, values.reshape(rows, -1), cache, batch, part.call)
            found[:, :, start:stop] = mixed.reshape(rows, kv, -1, dim)[chosen][..., : stop - start].swapaxes(
                0, 1
            )
        return found.reshape(-1, width)

    def head_linear(self, x: Floats, weight: CpuWeight, heads: int) -> Floats:
        """One small matrix per head: f32 `[rows, heads * cols]` -> `[rows, heads * outputs]`."""
        for head, part in enumerate(np.split(x, heads, axis=1)):
            self._tell(f"{weight.name}[{head}]", part)
        return super().head_linear(x, weight, heads)

    def ffn(self, x: Floats, gate_up: CpuWeight, down: CpuWeight, width: int, gating: Gating) -> Floats:
        """Dense gated FFN: f32 `[rows, hidden]` -> `[rows, hidden]`."""
        return self.linear(activated(self.linear(x, gate_up), width, gating), down)

    def without_experts(self, residual: Floats, routing: Routing, part: Experts) -> None:
        """residual f32 `[rows, hidden]` += shared expert, where the layer has one."""
        self._join_experts(residual, np.zeros_like(residual), routing, part)

    def expert(self, bank: ExpertBank, index: int) -> RoutedExpert:
        """A routed expert, its record read now; it is in memory for as long as the result."""
        layout, record = bank.layout, bank.record(index)
        slices = [_slice(self, record, layout, part) for part in range(layout.slices)]
        bias = _floats(record, layout.down_bias_offset, layout.hidden) if layout.biases else None
        return RoutedExpert(self, tuple(slices), layout.slice_width, bias)

    def _tell(self, name: str, x: Floats) -> None:
        listener = self._listeners.get(name)
        if listener is not None:
            listener(x)


@dataclass(frozen=True)
class RoutedExpert:
    """slices: gate_up (interleaved), its bias or None, and down. slice_width: intermediate values of each."""

    backend: RecordingBackend
    slices: tuple[tuple[CpuWeight, Floats | None, CpuWeight], ...]
    slice_width: int
    down_bias: Floats | None

    def intermediate(self, x: Floats, gating: Gating) -> Floats:
        """What down reads: `[rows, hidden]` -> `[rows, width]`."""
        parts = [
            activated(self.backend.linear(x, gate_up, bias), self.slice_width, gating)
            for gate_up, bias, _ in self.slices
        ]
        return np.concatenate(parts, axis=1)

    def down(self, h: Floats) -> Floats:
        """`[rows, width]` -> `[rows, hidden]`; the slices' results add up."""
        parts = zip(np.split(h, len(self.slices), axis=1), self.slices, strict=True)
        out: Floats = sum(self.backend.linear(part, down) for part, (_, _, down) in parts)  # type: ignore[assignment]
        return out if self.down_bias is None else out + self.down_bias


def activated(gate_up: Floats, width: int, gating: Gating) -> Floats:
    """Between gate_up and down, for all rows: `[rows, 2 * padded width]`, interleaved -> `[rows, width]`."""
    pairs = gate_up.reshape(len(gate_up), -1, 2, INTERLEAVE)
    gate, up = (torch.from_numpy(pairs[:, :, i].reshape(len(gate_up), -1)[:, :width]) for i in (0, 1))
    result: Floats = gated(gate, up, gating).numpy()
    return result


def _slice(
    backend: RecordingBackend, record: NDArray[np.uint8], layout: ExpertLayout, part: int
) -> tuple[CpuWeight, Floats | None, CpuWeight]:
    def matrix(offset: int, shape: PackedShape) -> CpuWeight:
        return backend.weight(PackedTensor("expert", shape, record[offset : offset + shape.nbytes]))

    rows = layout.gate_up.rows
    bias = _floats(record, layout.gate_up_bias_offset + part * rows * 4, rows) if layout.biases else None
    gate_up = matrix(layout.gate_up_offset(part), layout.gate_up)
    return gate_up, bias, matrix(layout.down_offset(part), layout.down)


def _floats(record: NDArray[np.uint8], offset: int, count: int) -> Floats:
    return record[offset : offset + 4 * count].view(np.float32)
