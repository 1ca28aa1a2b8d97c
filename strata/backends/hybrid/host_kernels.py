"""The kernel set of a machine without a GPU: the CPU backend's ops over views of emulated device memory.

For tests and simulation. Kernels see the ranges that their launch names and nothing else, so a launch that
forgets one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu import CpuBackend
from strata.backends.cpu_weights import as_gating, as_record_shape
from strata.backends.hybrid.arrays import DeviceRoutes, DraftTables, Matrix, PackedOnDevice
from strata.backends.hybrid.attention_steps import attention_in_steps
from strata.backends.hybrid.host_attention import HostAttention
from strata.backends.hybrid.host_verify import verify
from strata.backends.hybrid.kernel_set import (
    ExpertGroup,
    HeadColumns,
    KvPlaces,
    Launches,
    NormOf,
    Projections,
    RouterOnDevice,
    SumInto,
    work_of,
)
from strata.backends.hybrid.route_steps import route_in_steps
from strata.backends.parts import AttentionCall, Gating
from strata.device.base import Buffer, Launch, Work
from strata.device.buffers import Bytes
from strata.device.python_kernel import PythonKernel, Views
from strata.memory.regions import Arena
from strata.plan.spec import AttentionSpec, RouterSpec
from strata.store.formats import PackedShape

F32 = NDArray[np.float32]
LARGEST, NOTHING = np.float32(np.finfo(np.float32).max), np.float32(-3e38)
"""What NaN and what no logit counts as, see csrc/cuda/head_topk.cu."""


class HostKernels:
    """See `KernelSet`. cpu: computes; its int8 or f32 activations are this set's, too."""

    def __init__(self, cpu: CpuBackend) -> None:
        self.backend = cpu
        self._ops, self._cpu = cpu.ops, cpu.cpu
        self._attention = HostAttention(cpu)

    def use_tickets(self, tickets: Buffer) -> None:
        """Not needed: there are no blocks."""

    def rms_norm(self, x: Matrix, weight: Matrix, eps: float, out: Matrix) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            self._ops.rms_norm(self._cpu, _f32(reads[0], x), _vector(reads[1]), _f32(writes[0], out), eps)

        yield _launch("rms_norm", compute, (x.buffer, weight.buffer), (out.buffer,))

    def add(self, residual: Matrix, branch: Matrix, scale: float) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            self._ops.add(self._cpu, _f32(writes[0], residual), _f32(reads[0], branch), scale)

        yield _launch("add", compute, (branch.buffer, residual.buffer), (residual.buffer,))

    def scale_by_sigmoid(self, x: Matrix, gate: Matrix) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            self._ops.scale_by_sigmoid(self._cpu, _f32(writes[0], x), _f32(reads[0], gate))

        yield _launch("scale_by_sigmoid", compute, (gate.buffer, x.buffer), (x.buffer,))

    def _normed(self, x: Matrix, norm: NormOf | None, scratch: Arena) -> Generator[Launch, None, Matrix]:
        """x, or its rows normed by one launch."""
        if norm is None:
            return x
        normed = _like(x, scratch)
        yield from self.rms_norm(x, *norm, normed)
        return normed

    def linear(
        self,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        out: Matrix,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """One launch, and one before it for a norm."""
        x = yield from self._normed(x, norm, scratch)

        def compute(reads: Views, writes: Views) -> None:
            values, packed = _f32(reads[0], x), self._packed(reads[1], weight.shape)
            added = _vector(reads[2]) if bias is not None else None
            result = self._ops.linear(self._cpu, packed, values, added, self.backend.exact)
            _f32(writes[0], out)[:] = result

        reads = (x.buffer, weight.buffer, *_buffers(bias))
        yield _launch("linear", compute, reads, (out.buffer,), x.rows * weight.shape.rows * weight.shape.cols)

    def add_linear(
        self,
        residual: Matrix,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        scale: float,
        scratch: Arena,
    ) -> Launches:
        """Two launches."""
        branch = _like(residual, scratch)
        yield from self.linear(x, weight, bias, branch, scratch)
        yield from self.add(residual, branch, scale)

    def plain_linear(self, x: Matrix, matrix: Matrix, bias: Matrix | None, out: Matrix) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            added = _vector(reads[2]) if bias is not None else None
            values, weights = _f32(reads[0], x), _f32(reads[1], matrix)
            self._ops.plain_linear(self._cpu, values, weights, added, _f32(writes[0], out))

        reads = (x.buffer, matrix.buffer, *_buffers(bias))
        yield _launch("plain_linear", compute, reads, (out.buffer,), x.rows * matrix.rows * matrix.cols)

    def head_linear(
        self, x: Matrix, weight: PackedOnDevice, heads: int, out: Matrix, scratch: Arena
    ) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            values, packed = _f32(reads[0], x), self._packed(reads[1], weight.shape)
            result = self._ops.head_linear(self._cpu, packed, values, heads, self.backend.exact)
            _f32(writes[0], out)[:] = result

        macs = x.rows * weight.shape.rows * weight.shape.cols
        yield _launch("head_linear", compute, (x.buffer, weight.buffer), (out.buffer,), macs)

    def take_rows(self, x: Matrix, rows: Matrix, out: Matrix) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            _f32(writes[0], out)[:] = _f32(reads[0], x)[_i32(reads[1], rows)[0]]

        yield _launch("take_rows", compute, (x.buffer, rows.buffer), (out.buffer,))

    def copy_heads(
        self, x: Matrix, source: HeadColumns, out: Matrix, target: HeadColumns, heads: int, size: int
    ) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            taken = _f32(reads[0], x).reshape(x.rows, heads, source.head)
            put = _f32(writes[0], out).reshape(x.rows, heads, target.head)
            put[:, :, target.first : target.first + size] = taken[:, :, source.first : source.first + size]

        yield _launch("copy_heads", compute, (x.buffer,), (out.buffer,))

    def prepare_heads(
        self,
        x: Matrix,
        heads: int,
        tables: tuple[Matrix, Matrix] | None,
        spec: AttentionSpec,
        norm: Matrix | None,
        eps: float,
    ) -> Launches:
        """One launch."""
        none = np.empty((x.rows, 0), np.float32)

        def compute(reads: Views, writes: Views) -> None:
            views = iter(reads[1:])
            cosines, sines = (_f32(next(views), t) for t in tables) if tables else (none, none)
            weight = _vector(next(views)) if norm is not None else None
            values, interleaved = _f32(writes[0], x), spec.rope.interleaved
            args = values, heads, weight, eps, spec.clip_qkv, cosines, sines, interleaved
            self._ops.prepare_heads(self._cpu, *args)

        reads = (x.buffer, *(table.buffer for table in tables or ()), *_buffers(norm))
        yield _launch("prepare_heads", compute, reads, (x.buffer,))

    def attention(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix | None,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """One launch that appends and attends."""
        yield self._attention.launch(q, k, v, places, call, sinks, out)

    def attention_of(
        self,
        projections: Projections,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """One op after the other."""
        return attention_in_steps(self, projections, places, call, sinks, out, scratch)

    def route(
        self, logits: Matrix, spec: RouterSpec, select_bias: Matrix | None, routes: DeviceRoutes
    ) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            bias = _vector(reads[1]) if select_bias is not None else None
            ids, weights = _i32(writes[0], routes.ids), _f32(writes[1], routes.weights)
            self._ops.route(self._cpu, _f32(reads[0], logits), spec, bias, ids, weights)

        reads = (logits.buffer, *_buffers(select_bias))
        yield _launch("route", compute, reads, (routes.ids.buffer, routes.weights.buffer))

    def norm_and_route(
        self,
        x: Matrix,
        hidden: Matrix | None,
        router: RouterOnDevice,
        scratch: Arena,
    ) -> Launches:
        """Three launches."""
        return route_in_steps(self, x, hidden, router, scratch)

    def head_topk(
        self, logits: Matrix, columns: int, values: Matrix, ids: Matrix, scratch: Arena
    ) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            rows = _f32(reads[0], logits)[:, :columns]
            rows = np.where(np.isnan(rows), LARGEST, np.maximum(rows, NOTHING))
            order = np.argsort(-rows, axis=1, kind="stable")[:, : values.cols]
            best = np.take_along_axis(rows, order, axis=1)
            _f32(writes[0], values)[:] = best
            _i32(writes[1], ids)[:] = np.where(best > NOTHING, order, -1)

        yield _launch("head_topk", compute, (logits.buffer,), (values.buffer, ids.buffer))

    def verify_draft(
        self, values: Matrix, ids: Matrix, drafts: DraftTables, accepted: Matrix, tokens: Matrix
    ) -> Launches:
        """One launch."""

        def compute(reads: Views, writes: Views) -> None:
            logits, candidates = _f32(reads[0], values).astype(np.float64), _i32(reads[1], ids)
            settings = _f32(reads[2], drafts.settings).astype(np.float64)
            draft, numbers = _i32(reads[3], drafts.draft)[0], _f32(reads[4], drafts.numbers)[0]
            first_row = _i32(reads[5], drafts.first_row)[0]
            counts, chosen = _i32(writes[0], accepted)[0], _i32(writes[1], tokens)[0]
            for i, own in enumerate(settings):
                rows = slice(first_row[i], first_row[i + 1])
                counts[i], chosen[i] = verify(
                    logits[rows], candidates[rows], draft[rows], own, numbers[rows].astype(np.float64)
                )

        tables = (drafts.settings, drafts.draft, drafts.numbers, drafts.first_row)
        reads = (values.buffer, ids.buffer, *(table.buffer for table in tables))
        yield _launch("verify_draft", compute, reads, (accepted.buffer, tokens.buffer))

    def ffn(
        self,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """One launch."""
        kind = as_gating(self._ops, gating)

        def compute(reads: Views, writes: Views) -> None:
            first, second = self._packed(reads[1], gate_up.shape), self._packed(reads[2], down.shape)
            values = _f32(reads[0], x)
            result = self._ops.ffn(self._cpu, values, first, second, kind, self.backend.exact)
            _f32(writes[0], out)[:] = result

        macs = x.rows * (gate_up.shape.rows * gate_up.shape.cols + down.shape.rows * down.shape.cols)
        reads = (x.buffer, gate_up.buffer, down.buffer)
        yield _launch("ffn", compute, reads, (out.buffer,), macs)

    def add_ffn(
        self,
        residual: Matrix,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        scale: float,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """Two launches, and one before them for a norm."""
        x = yield from self._normed(x, norm, scratch)
        branch = _like(residual, scratch)
        yield from self.ffn(x, gate_up, down, gating, branch, scratch)
        yield from self.add(residual, branch, scale)

    def experts(
        self, x: Matrix, routes: DeviceRoutes, group: ExpertGroup, into: SumInto, scratch: Arena
    ) -> Launches:
        """One launch. Records are found by a table of addresses in pinned memory, as a kernel would."""
        addresses = np.zeros(group.count, np.uint64)
        addresses[list(group.experts)] = [record.address for record in group.records]
        places = group.pinned(addresses, "addresses of experts")

        out, rest = into.target, into.rest

        def compute(reads: Views, writes: Views) -> None:
            hidden, ids = _f32(reads[0], x), _i32(reads[1], routes.ids)
            weights, table = _f32(reads[2], routes.weights), reads[3].view(np.uint64)
            records = {view.ctypes.data: view for view in reads[4 : 4 + len(group.records)]}
            result = self._experts(group, hidden, ids, weights, lambda index: records[int(table[index])])
            if rest is not None:
                result += _f32(reads[4 + len(group.records)], rest)
            target, result = _f32(writes[0], out), np.float32(into.scale) * result
            target[:] = target + result if into.add else result

        reads = (x.buffer, routes.ids.buffer, routes.weights.buffer, places, *group.records)
        layout = group.layout
        sizes = layout.gate_up.rows * layout.gate_up.cols + layout.down.rows * layout.down.cols
        macs = group.pairs * layout.slices * sizes
        again = (out.buffer,) if into.add else ()
        yield _launch("experts", compute, (*reads, *_buffers(rest), *again), (out.buffer,), macs)

    def _experts(
        self, group: ExpertGroup, x: F32, ids: NDArray[np.int32], weights: F32, record: Callable[[int], Bytes]
    ) -> F32:
        ops = self._ops
        table = ops.ExpertTable(as_record_shape(ops, group.layout), group.count, record)
        kind, active = as_gating(ops, group.gating), list(group.experts)
        result: F32 = ops.experts(self._cpu, x, ids, weights, table, kind, self.backend.exact, active)
        return result

    def _packed(self, view: Bytes, shape: PackedShape) -> Any:
        return self._ops.PackedMatrix(view, shape.format.code, shape.rows, shape.cols)


def _launch(
    name: str,
    compute: Callable[[Views, Views], None],
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    macs: int = 0,
) -> Launch:
    work: Work = work_of(reads, writes, macs)
    return Launch(PythonKernel(name, compute), tuple(reads), tuple(writes), work)


def _like(matrix: Matrix, scratch: Arena) -> Matrix:
    return Matrix(scratch.take(matrix.buffer.nbytes, "branch"), matrix.rows, matrix.cols)


def _buffers(*matrices: Matrix | None) -> Iterator[Buffer]:
    return (matrix.buffer for matrix in matrices if matrix is not None)


def _f32(view: Bytes, matrix: Matrix) -> F32:
    return view.view(np.float32).reshape(matrix.rows, matrix.cols)


def _i32(view: Bytes, matrix: Matrix) -> NDArray[np.int32]:
    return view.view(np.int32).reshape(matrix.rows, matrix.cols)


def _vector(view: Bytes) -> F32:
    return view.view(np.float32)
