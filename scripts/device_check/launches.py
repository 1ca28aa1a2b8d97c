"""Launches of single ops at the sizes of Qwen3-30B-A3B, made once and run again and again.

Memory holds whatever it held: speed does not depend on it. Every op goes over so many copies of its weights
that no cache holds them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata import core
from strata.backends.base import KvSpec
from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.hybrid.arrays import DeviceRoutes, Matrix, PackedOnDevice
from strata.backends.hybrid.kernel_set import ExpertGroup, KvPlaces, NormOf, RouterOnDevice, SumInto
from strata.backends.parts import AttentionCall, Gating
from strata.core import Batch
from strata.device.base import Buffer, Device, Launch
from strata.memory.regions import Arena
from strata.plan.activations import TICKETS
from strata.plan.spec import RouterSpec
from strata.store.formats import FORMATS, ExpertLayout, PackedShape

SPREAD, SPREAD_EMULATED = 256 << 20, 1 << 20
"""Bytes that the copies of an op's weights take together: several times what a card's L2 holds."""
SCRATCH = 64 << 20


@dataclass(frozen=True)
class LaunchSet:
    """The launches of one op, once for each copy of what it reads. nbytes: what one run must move."""

    bench: Bench
    copies: Sequence[Sequence[Launch]]
    nbytes: int

    def make(self, index: int) -> None:
        """Launch the op on one of the copies."""
        for launch in self.copies[index % len(self.copies)]:
            self.bench.device.launch(launch, self.bench.stream)


class Bench:
    """Owns nothing but what it takes of the device, which the caller closes."""

    def __init__(self, device: Device, kernels: CudaKernels, emulated: bool) -> None:
        self.device = device
        self.kernels = kernels
        self.stream = device.stream("kernels")
        tickets = device.alloc(4 * TICKETS, "tickets")
        device.fill(tickets, 0, self.stream)
        kernels.use_tickets(tickets)
        self._spread = SPREAD_EMULATED if emulated else SPREAD
        self._scratch = Arena("scratch", device.alloc(SCRATCH, "scratch"), "raise SCRATCH")
        self._pinned = Arena("tables", device.host_alloc(1 << 20, "tables"), "raise the tables' size")

    def linear(self, fmt: str, rows: int, cols: int, tokens: int) -> LaunchSet:
        """y = x W^T."""
        shape = PackedShape(FORMATS[fmt], rows, cols)
        x, out = self._matrix(tokens, cols), self._matrix(tokens, rows)
        weights = [PackedOnDevice(b, shape) for b in self._copies(shape.nbytes)]
        made = [self._made(self.kernels.linear(x, w, None, out, self._scratch)) for w in weights]
        return LaunchSet(self, made, shape.nbytes + x.buffer.nbytes + out.buffer.nbytes)

    def rms_norm(self, tokens: int, cols: int) -> LaunchSet:
        """One norm."""
        x, weight, out = self._matrix(tokens, cols), self._matrix(1, cols), self._matrix(tokens, cols)
        made = [self._made(self.kernels.rms_norm(x, weight, 1e-6, out))]
        return LaunchSet(self, made, 2 * x.buffer.nbytes + weight.buffer.nbytes)

    def router(self, tokens: int, cols: int, experts: int, top_k: int) -> LaunchSet:
        """Norm, logits and the choice."""
        x, hidden, norm = self._matrix(tokens, cols), self._matrix(tokens, cols), self._matrix(1, cols)
        routes = DeviceRoutes(self._matrix(tokens, top_k), self._matrix(tokens, top_k))
        made = []
        for buffer in self._copies(experts * cols * 4):
            matrix = Matrix(buffer, experts, cols)
            router = RouterOnDevice(
                RouterSpec(experts, top_k), NormOf(norm, 1e-6), matrix, None, None, routes
            )
            made.append(self._made(self.kernels.norm_and_route(x, hidden, router, self._scratch)))
        return LaunchSet(self, made, 4 * cols * (experts + 2 * tokens + 1))

    def experts(self, fmt: str, hidden: int, width: int, top_k: int) -> LaunchSet:
        """The experts of one token: gate and up, then down and the sum."""
        layout = ExpertLayout(FORMATS[fmt], FORMATS[fmt], hidden, width, 1, False)
        x, out = self._matrix(1, hidden), self._matrix(1, hidden)
        routes = DeviceRoutes(self._matrix(1, top_k), self._matrix(1, top_k))
        records = self._copies(layout.record_bytes, at_least=top_k)
        ids = np.arange(top_k, dtype=np.int32).reshape(1, -1)
        weights = np.full((1, top_k), 1 / top_k, np.float32)
        made = []
        for first in range(0, len(records) - top_k + 1, top_k):
            chosen = records[first : first + top_k]
            group = ExpertGroup(
                layout, Gating("silu"), top_k, range(top_k), chosen, ids, weights, top_k, self._table
            )
            made.append(
                self._made(self.kernels.experts(x, routes, group, SumInto(out, False), self._scratch))
            )
        return LaunchSet(self, made, top_k * layout.record_bytes + 2 * x.buffer.nbytes)

    def attention(self, dtype: Any, heads: int, kv_heads: int, dim: int, depth: int) -> LaunchSet:
        """One decoding token that sees `depth` others: append, attend."""
        spec = KvSpec(1, kv_heads, dim, dim, core.PAGE_TOKENS, dtype)
        pages = -(-(depth + 1) // spec.page_tokens)
        q, k, v = (self._matrix(1, n * dim) for n in (heads, kv_heads, kv_heads))
        out, call = self._matrix(1, heads * dim), AttentionCall(0, heads, dim**-0.5)
        table = np.arange(pages, dtype=np.int32)
        batch = Batch.single(np.zeros(1, np.int32), np.array([depth], np.int32), table, table[:1])
        made = []
        for whole in self._copies(pages * spec.layer_bytes):
            cache = _Pages(spec, whole)
            places = KvPlaces(0, batch, cache, self._table(cache.addresses(), "pages"), self._table)
            launches = self.kernels.attention(q, k, v, places, call, None, out, self._scratch)
            made.append(self._made(launches))
        return LaunchSet(self, made, depth * spec.layer_bytes // spec.page_tokens)

    def _made(self, launches: Any) -> list[Launch]:
        """Scratch may be another op's as well: all run on one stream."""
        with self._scratch.scope():
            return list(launches)

    def _matrix(self, rows: int, cols: int) -> Matrix:
        return Matrix(self.device.alloc(rows * cols * 4, "activations"), rows, cols)

    def _copies(self, nbytes: int, at_least: int = 1) -> list[Buffer]:
        count = max(at_least, -(-self._spread // nbytes))
        return [self.device.alloc(nbytes, "weights") for _ in range(count)]

    def _table(self, values: NDArray[Any], what: str) -> Buffer:
        buffer = self._pinned.take(values.nbytes, what)
        self.device.host_write(buffer)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return buffer


class _Pages:
    """The pages of one sequence, one after the other: `kernel_set.KvBlocks`."""

    def __init__(self, spec: KvSpec, whole: Buffer) -> None:
        self.spec = spec
        self._whole = whole
        self._count = whole.nbytes // spec.layer_bytes

    def addresses(self) -> NDArray[np.uint64]:
        """Of every page."""
        size = self.spec.layer_bytes
        return np.array([self._whole.address + i * size for i in range(self._count)], np.uint64)

    def blocks(self, layer: int, sequence: core.Sequence) -> list[Buffer]:
        """All of them."""
        size = self.spec.layer_bytes
        return [self._whole.slice(i * size, size) for i in range(self._count)]

    def offset(self, layer: int) -> int:
        """A page has one layer."""
        return 0

    def begin_layer(self, layer: int) -> None:
        """Nothing to bring."""

    def end_layer(self, layer: int) -> None:
        """Nothing to write back."""
