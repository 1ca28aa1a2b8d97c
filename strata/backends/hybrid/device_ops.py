"""The hybrid backend's elementary ops: each takes its result from the workspace and launches kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.composed import ComposedOps
from strata.backends.hybrid.arrays import DeviceRoutes, HybridWeight, Matrix, Vector, require
from strata.backends.hybrid.kernel_set import (
    HeadColumns,
    KernelSet,
    KvPlaces,
    Launches,
    NormOf,
    Projections,
    RouterOnDevice,
)
from strata.backends.hybrid.kv_blocks import DeviceKv
from strata.backends.hybrid.kv_stream import StreamedKv
from strata.backends.hybrid.memory import HybridMemory
from strata.backends.parts import (
    Attention,
    AttentionCall,
    FeedForward,
    Gating,
    GroupedQueryAttention,
    LatentAttention,
    Norm,
    Router,
)
from strata.backends.rope import rope_tables
from strata.core import Batch
from strata.device.base import Device, Graph, Launch
from strata.plan.spec import AttentionSpec, RopeSpec, RouterSpec

PagedKv = DeviceKv | StreamedKv


class DeviceOps(ComposedOps):
    """Part of HybridBackend. Everything is launched on one stream, in the order of the calls.

    memory: as `kv_cache` cut it. label: of the ops to come, on the timeline; transfers count layers alike.
    """

    device: Device
    kernels: KernelSet
    memory: HybridMemory
    label = ""

    def __init__(self) -> None:
        super().__init__()
        # Of the pass at hand: rope tables, and the table of pages of a batch.
        self._ropes: dict[RopeSpec, tuple[Matrix, Matrix]] = {}
        self._positions: NDArray[np.int32] | None = None
        self._page_table: tuple[Batch, Any] | None = None
        self._recorded: list[Launch] | None = None

    def rms_norm(self, x: Matrix, weight: Vector, eps: float) -> Matrix:
        """Root-mean-square norm over groups of len(weight) columns."""
        require("rms_norm", "columns", x.cols % len(weight), f"modulo {len(weight)} weights must be", 0)
        out = self.new_matrix(x.rows, x.cols, "rms_norm")
        self.launch(self.kernels.rms_norm(x, self.memory.static.matrix(weight), eps, out))
        return out

    def add(self, residual: Matrix, branch: Matrix, scale: float = 1.0) -> None:
        """residual += scale * branch."""
        if residual.shape != branch.shape:
            raise ValueError(f"add: residual {residual.shape} but branch {branch.shape}")
        self.launch(self.kernels.add(residual, branch, scale))

    def scaled_by_sigmoid(self, x: Matrix, gate: Matrix) -> Matrix:
        """x itself, which is changed."""
        require("scaled_by_sigmoid", "rows of the gate", gate.rows, "rows of x", x.rows)
        self.launch(self.kernels.scale_by_sigmoid(x, gate))
        return x

    def linear(self, x: Matrix, weight: HybridWeight, bias: Vector | None = None) -> Matrix:
        """x W^T + bias."""
        require("linear", "columns of x", x.cols, "columns of the weight", weight.cols)
        static = self.memory.static
        packed, added = static.packed(weight), static.matrix_if(bias)
        out = self.new_matrix(x.rows, weight.rows, "linear")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.linear(x, packed, added, out, scratch))
        return out

    def _norm_linear(self, x: Matrix, norm: Norm, weight: HybridWeight, bias: Vector | None = None) -> Matrix:
        """linear of the norm of x, in as few launches as the kernels can."""
        static = self.memory.static
        packed, added = static.packed(weight), static.matrix_if(bias)
        before = self._norm_of(norm)
        out = self.new_matrix(x.rows, weight.rows, "linear")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.linear(x, packed, added, out, scratch, before))
        return out

    def _norm_of(self, norm: Norm) -> NormOf:
        return NormOf(self.memory.static.matrix(norm.weight), norm.eps)

    def plain_linear(self, x: Matrix, matrix: Vector, bias: Vector | None = None) -> Matrix:
        """x W^T + bias with an unpacked matrix."""
        static = self.memory.static
        weights, added = static.matrix(matrix), static.matrix_if(bias)
        require("plain_linear", "columns of x", x.cols, "columns of the matrix", weights.cols)
        out = self.new_matrix(x.rows, weights.rows, "plain_linear")
        self.launch(self.kernels.plain_linear(x, weights, added, out))
        return out

    def head_linear(self, x: Matrix, weight: HybridWeight, heads: int) -> Matrix:
        """One small matrix per head."""
        require("head_linear", "columns of x", x.cols, "heads * columns of the weight", heads * weight.cols)
        packed = self.memory.static.packed(weight)
        out = self.new_matrix(x.rows, weight.rows, "head_linear")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.head_linear(x, packed, heads, out, scratch))
        return out

    def take_rows(self, x: Matrix, rows: NDArray[np.int32]) -> Matrix:
        """x[rows]."""
        wanted = self.memory.uploads.matrix(rows.reshape(1, -1), self.memory.workspace, "rows")
        out = self.new_matrix(len(rows), x.cols, "take_rows")
        self.launch(self.kernels.take_rows(x, wanted, out))
        self.memory.uploads.end()
        return out

    def split(self, x: Matrix, sizes: Sequence[int]) -> list[Matrix]:
        """Column slices, copied."""
        return self.split_heads(x, 1, sizes)

    def join_heads(self, parts: Sequence[Matrix], heads: int) -> Matrix:
        """Head h of the result is head h of every part, one after the other."""
        sizes = [part.cols // heads for part in parts]
        out = self.new_matrix(parts[0].rows, heads * sum(sizes), "join_heads")
        for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
            target = HeadColumns(sum(sizes), end - size)
            self.launch(self.kernels.copy_heads(part, HeadColumns(size, 0), out, target, heads, size))
        return out

    def split_heads(self, x: Matrix, heads: int, sizes: Sequence[int]) -> list[Matrix]:
        """Inverse of join_heads."""
        require("split_heads", "columns of x", x.cols, "heads * sum of the sizes", heads * sum(sizes))
        parts = []
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            part = self.new_matrix(x.rows, heads * size, "split_heads")
            source = HeadColumns(sum(sizes), end - size)
            self.launch(self.kernels.copy_heads(x, source, part, HeadColumns(size, 0), heads, size))
            parts.append(part)
        return parts

    def prepare_heads(
        self,
        x: Matrix,
        heads: int,
        positions: NDArray[np.int32],
        spec: AttentionSpec,
        norm: Vector | None,
        eps: float,
    ) -> Matrix:
        """Norm, clip, rotate; in place."""
        require("prepare_heads", "positions", len(positions), "rows", x.rows)
        tables, weight = self._rope(spec.rope, positions), self.memory.static.matrix_if(norm)
        self.launch(self.kernels.prepare_heads(x, heads, tables, spec, weight, eps))
        return x

    def attention(
        self, q: Matrix, k: Matrix, v: Matrix | None, cache: PagedKv, batch: Batch, call: AttentionCall
    ) -> Matrix:
        """Append k and v, then causal attention."""
        kv = cache.spec
        require("attention", "columns of q", q.cols, "heads * key_dim", call.heads * kv.key_dim)
        require("attention", "columns of k", k.cols, "kv_heads * key_dim", kv.kv_heads * kv.key_dim)
        if (v is None) != kv.value_in_key:
            raise ValueError(f"attention: v given is {v is not None}, value_in_key is {kv.value_in_key}")
        sinks, places = self.memory.static.matrix_if(call.sinks), self._places(cache, batch, call)
        out = self.new_matrix(q.rows, call.heads * kv.value_dim, "attention")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.attention(q, k, v, places, call, sinks, out, scratch))
        cache.end_layer(call.layer)
        return out

    def _attend_projected(
        self, qkv: Matrix, part: GroupedQueryAttention, cache: PagedKv, batch: Batch
    ) -> Matrix:
        """In as few launches as the kernels can."""
        static, call = self.memory.static, part.call
        norms = (static.matrix_if(part.q_norm), static.matrix_if(part.k_norm))
        tables = self._rope(part.spec.rope, batch.positions)
        projections = Projections(qkv, part.spec, *norms, tables, part.norm.eps)
        sinks, places = static.matrix_if(call.sinks), self._places(cache, batch, call)
        out = self.new_matrix(qkv.rows, call.heads * cache.spec.value_dim, "attention")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.attention_of(projections, places, call, sinks, out, scratch))
        cache.end_layer(call.layer)
        return out

    def _places(self, cache: PagedKv, batch: Batch, call: AttentionCall) -> KvPlaces:
        """Of a layer whose attention begins."""
        table = self._pages(cache, batch)
        cache.begin_layer(call.layer)
        return KvPlaces(call.layer, batch, cache, table, self.memory.uploads.pinned)

    def attend(self, residual: Matrix, part: Attention, cache: PagedKv, batch: Batch) -> None:
        """The norm is part of the product that follows, where it is one product."""
        if isinstance(part, LatentAttention):
            super().attend(residual, part, cache, batch)
            return
        qkv = self._norm_linear(residual, part.norm, part.qkv, part.qkv_bias)
        self._add_linear(residual, self._attend_projected(qkv, part, cache, batch), part)

    def logits(self, residual: Matrix, rows: NDArray[np.int32], norm: Norm, head: HybridWeight) -> Matrix:
        """Norm and head, of the wanted rows only."""
        return self._norm_linear(self.take_rows(residual, rows), norm, head)

    def _add_linear(self, residual: Matrix, mixed: Matrix, part: Attention) -> None:
        """The output projection, which joins the residual on the way."""
        static = self.memory.static
        weight, bias = static.packed(part.out), static.matrix_if(part.out_bias)
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.add_linear(residual, mixed, weight, bias, part.scale, scratch))

    def feed_forward(self, residual: Matrix, part: FeedForward) -> None:
        """Norm and FFN, whose last product joins the residual on the way."""
        static, ffn, norm = self.memory.static, part.ffn, self._norm_of(part.norm)
        weights = static.packed(ffn.gate_up), static.packed(ffn.down)
        gating, scale = ffn.gating, part.scale
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.add_ffn(residual, residual, *weights, gating, scale, scratch, norm))

    def ffn(self, x: Matrix, gate_up: HybridWeight, down: HybridWeight, width: int, gating: Gating) -> Matrix:
        """Dense gated FFN."""
        require("ffn", "width", width, "columns of down", down.cols)
        require("ffn", "columns of x", x.cols, "columns of gate_up", gate_up.cols)
        first, second = self.memory.static.packed(gate_up), self.memory.static.packed(down)
        out = self.new_matrix(x.rows, down.rows, "ffn")
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.ffn(x, first, second, gating, out, scratch))
        return out

    def route_on_device(self, logits: Matrix, spec: RouterSpec, select_bias: Vector | None) -> DeviceRoutes:
        """`route` whose result stays on the device."""
        require("route", "columns of the logits", logits.cols, "experts", spec.experts)
        ids, weights = (self.new_matrix(logits.rows, spec.top_k, what) for what in ("expert ids", "weights"))
        routes, bias = DeviceRoutes(ids, weights), self.memory.static.matrix_if(select_bias)
        self.launch(self.kernels.route(logits, spec, bias, routes))
        return routes

    def norm_and_route(self, residual: Matrix, router: Router) -> tuple[Matrix, DeviceRoutes]:
        """The rows, normed, and what the router chooses for them."""
        hidden = self.new_matrix(residual.rows, residual.cols, "hidden")
        return hidden, self._routed_by(residual, router, hidden)

    def guess_routes(self, residual: Matrix, router: Router) -> DeviceRoutes:
        """What the router would choose for rows that are not yet ready for it."""
        return self._routed_by(residual, router, None)

    def _routed_by(self, residual: Matrix, router: Router, hidden: Matrix | None) -> DeviceRoutes:
        spec, static = router.spec, self.memory.static
        ids, weights = (
            self.new_matrix(residual.rows, spec.top_k, what) for what in ("expert ids", "weights")
        )
        matrix, bias = static.matrix(router.matrix), static.matrix_if(router.bias)
        select_bias, routes = static.matrix_if(router.select_bias), DeviceRoutes(ids, weights)
        given = RouterOnDevice(spec, self._norm_of(router.norm), matrix, bias, select_bias, routes)
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.norm_and_route(residual, hidden, given, scratch))
        return routes

    def new_matrix(self, rows: int, cols: int, what: str) -> Matrix:
        """Room in the workspace, until the scope at hand ends."""
        return Matrix(self.memory.workspace.take(rows * cols * 4, what), rows, cols)

    def launch(self, launches: Launches) -> None:
        """Enqueue on the compute stream, or record."""
        for launch in launches:
            made = replace(launch, label=self.label)
            if self._recorded is None:
                self.device.launch(made, self.memory.compute)
            else:
                self._recorded.append(made)

    @contextmanager
    def recorded(self) -> Iterator[list[Launch]]:
        """Launches inside are listed and not enqueued."""
        self._recorded = found = list[Launch]()
        try:
            yield found
        finally:
            self._recorded = None

    def replay(self, graph: Graph, now: Callable[[], Sequence[Launch]]) -> None:
        """Enqueue a graph on the compute stream; now: see `Device.replay`."""
        self.device.replay(graph, self.memory.compute, now, self.label)

    def _prepare(self, batch: Batch, ropes: Sequence[RopeSpec]) -> None:
        """Tables that all layers of a pass share."""
        self._positions, self._ropes = None, {}
        made = {rope: self._rope(rope, batch.positions) for rope in ropes}
        self._ropes = {rope: tables for rope, tables in made.items() if tables is not None}
        self._positions = batch.positions

    def _rope(self, rope: RopeSpec, positions: NDArray[np.int32]) -> tuple[Matrix, Matrix] | None:
        """cos and sin, on the device; None for a rotation of no elements."""
        if rope.rotary_dim == 0:
            return None
        if positions is self._positions and rope in self._ropes:
            return self._ropes[rope]
        cosines, sines = rope_tables(rope, positions)
        upload, workspace = self.memory.uploads.matrix, self.memory.workspace
        return upload(cosines, workspace, "cosines"), upload(sines, workspace, "sines")

    def _pages(self, cache: PagedKv, batch: Batch) -> Any:
        """The table of the batch's pages, made once per pass."""
        if self._page_table is None or self._page_table[0] is not batch:
            table = self.memory.uploads.pinned(cache.addresses(batch), "page table")
            self._page_table = batch, table
        return self._page_table[1]
