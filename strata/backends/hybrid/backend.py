"""The hybrid backend: a device does what it holds the weights for, the CPU what would be too slow to bring.

Array validity: what an op returns lives in the workspace until the next `embedding`, which begins a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import BestLogits, DraftRows, KvSpec, Verified
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid import make_parts as parts
from strata.backends.hybrid.arrays import DeviceRoutes, HybridWeight, Matrix, Vector
from strata.backends.hybrid.device_ops import DeviceOps, PagedKv
from strata.backends.hybrid.estimates import base_seconds
from strata.backends.hybrid.expert_flow import FlowMetrics
from strata.backends.hybrid.expert_groups import Branch
from strata.backends.hybrid.expert_source import ExpertSource
from strata.backends.hybrid.experts_host import ExpertCall
from strata.backends.hybrid.graphs import LayerGraphs
from strata.backends.hybrid.kernel_set import KernelSet
from strata.backends.hybrid.kv_blocks import DeviceKv
from strata.backends.hybrid.memory import HybridMemory
from strata.backends.hybrid.options import DECODE_TOKENS, HybridOptions
from strata.backends.hybrid.prefetch import PrefetchMetrics
from strata.backends.hybrid.results import Results, draft_tables
from strata.backends.hybrid.slots import SlotLoader
from strata.backends.hybrid.split import SplitMetrics
from strata.backends.parts import (
    ExpertBank,
    Experts,
    Gating,
    Layer,
    RoutedFfn,
    Routes,
)
from strata.core import Batch
from strata.device.base import Device
from strata.errors import CapacityError
from strata.memory.expert_slots import CacheStatistics
from strata.memory.regions import aligned
from strata.memory.transfer import Priority, TransferStatistics
from strata.plan.activations import MOST_CANDIDATES
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.formats import PackedTensor

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class HybridMetrics:
    """How routed experts were answered, why, and what it cost; counted since the backend was made."""

    experts: FlowMetrics
    split: SplitMetrics
    prefetch: PrefetchMetrics
    cache: CacheStatistics
    transfers: TransferStatistics


class HybridBackend(DeviceOps):
    """See `base.Backend` for what each op does. One model, whose KV cache is made once.

    cpu: embeds tokens and computes experts; device: everything else. The caller closes the device, last.
    """

    name = "hybrid"
    most_best = MOST_CANDIDATES
    draws = True

    def __init__(
        self, device: Device, kernels: KernelSet, cpu: CpuBackend, spec: ModelSpec, options: HybridOptions
    ) -> None:
        super().__init__()
        self.device = device
        self.kernels = kernels
        self.cpu = cpu
        self.spec = spec
        self.options = options
        self.graphs = LayerGraphs(self)
        self._static_bytes = 0
        self._step = -1

    def supports(self, op: str, fmt: str) -> bool:
        """What the CPU backend supports."""
        return self.cpu.supports(op, fmt)

    # What the model is made of

    def weight(self, tensor: PackedTensor) -> HybridWeight:
        """A handle that keeps a view of `tensor.data`, and room for it on the device.

        The embedding, whose rows the host looks up, has none unless it is the head, too.
        """
        if tensor.name != names.EMBED or self.spec.tied_head:
            self._static_bytes += aligned(tensor.shape.nbytes)
        return HybridWeight(tensor, self.cpu.weight(tensor))

    def vector(self, values: NDArray[Any]) -> Vector:
        """A copy on the host, and room on the device."""
        made = Vector(self.cpu.vector(values))
        self._static_bytes += aligned(made.nbytes)
        return made

    def kv_cache(self, spec: KvSpec, pages: int) -> PagedKv:
        """Cuts the device's memory: weights made so far, expert slots, `pages` KV pages, workspace.

        With pages at the host, the device has room for their blocks of two layers.

        CapacityError when it does not fit, or when it was done before.
        """
        if hasattr(self, "memory"):
            raise CapacityError(
                "a second KV cache is asked for, and the device's memory was cut for one",
                remedy="make a backend for each engine",
            )
        options, self.kv = self.options, spec
        self.memory = HybridMemory(self.device, self.spec, spec, pages, self._static_bytes, options)
        self.kernels.use_tickets(self.memory.tickets)
        self.source = ExpertSource(self.device, options.locks)
        self.cache = parts.make_cache(self.spec, options)
        self.loader = SlotLoader(self.cache, self.memory.region, self.memory.queue, self.source)
        if self.spec.experts is not None:
            made = parts.make_expert_parts(self, self.cpu, self.spec, options, self.loader, self.source)
            self.readback, self.flow, self.prefetcher = made
        logits = options.logit_rows * max(self.spec.vocab, 2 * MOST_CANDIDATES)
        largest = max(options.rows * self.spec.hidden, logits)
        self._results = Results(self.device, self.memory.compute, largest)
        self.memory.begin_step()
        staged = options.staged_blocks
        self._kv = parts.make_kv(self.memory, self.cache, self.spec, spec, pages, staged, self._settle_slots)
        return self._kv

    def copy_pages(self, cache: PagedKv, copies: Sequence[tuple[int, int]]) -> None:
        """One after the other."""
        cache.copy_pages(copies)

    # A pass

    def embedding(self, weight: HybridWeight, token_ids: NDArray[np.int32], scale: float) -> Matrix:
        """Rows of the embedding, times scale, looked up by the host. A new pass begins.

        CapacityError for more rows than the memory was cut for.
        """
        if len(token_ids) > self.options.rows:
            raise CapacityError(
                f"a pass of {len(token_ids)} tokens, the device's memory was cut for {self.options.rows}",
                remedy="lower engine.prefill_chunk or the number of requests",
            )
        self.memory.begin_step()
        rows = self.cpu.embedding(weight.host, token_ids, scale)
        return self.memory.uploads.matrix(rows, self.memory.workspace, "embedding")

    def run_layers(self, residual: Matrix, layers: Sequence[Layer], cache: Any, batch: Batch) -> Routes:
        """residual through all layers, in place; the experts' place is decided layer by layer."""
        self._begin(layers, batch)
        ids, used = dict[int, NDArray[np.int32]](), dict[int, int]()
        for index, layer in enumerate(layers):
            due = self._step * len(layers) + index
            self.label = f"layer {due}"
            self.memory.queue.begin_layer(due)
            self.loader.settle()
            with self.memory.workspace.scope():
                chosen = self.graphs.run(index, partial(self._to_router, residual, layer, cache, batch))
                if chosen is not None:
                    after = layers[index + 1] if index + 1 < len(layers) else None
                    assert isinstance(layer.ffn, RoutedFfn), "a dense layer has no router"
                    ids[index] = self._routed(residual, layer.ffn, chosen, after, due)
                    used[index] = len(np.unique(ids[index]))
        self._end()
        return Routes(ids, used)

    def experts(
        self,
        x: Matrix,
        ids: NDArray[np.int32],
        weights: F32,
        bank: ExpertBank,
        gating: Gating,
        active: Sequence[int] | None = None,
    ) -> Matrix:
        """Routed experts of rows whose choice comes from the host."""
        upload, workspace = self.memory.uploads.matrix, self.memory.workspace
        chosen = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(weights, np.float32)
        routes = DeviceRoutes(*(upload(values, workspace, "routes") for values in chosen))
        self.source.know([bank])
        self.readback.start(routes, x)
        hidden = self.readback.finish().hidden
        self.flow.release()
        every = np.ones(x.rows, np.bool_)
        call = ExpertCall(x, hidden, routes, *chosen, bank, gating, every)
        return self.flow.finish(self.flow.begin(call, self.memory.queue.layer, active))

    def route(self, logits: Matrix, spec: Any, select_bias: Vector | None) -> tuple[Any, Any]:
        """The choice of every row, read back."""
        self.readback.start(self.route_on_device(logits, spec, select_bias), None)
        read = self.readback.finish()
        return read.ids, read.weights

    def to_numpy(self, x: Matrix) -> F32:
        """A copy in host memory, when the device has computed it."""
        return self._results.read([x], "result")[0]

    def some_rows(self, x: Matrix, first: int, count: int) -> Matrix:
        """A view."""
        row = 4 * x.cols
        return Matrix(x.buffer.slice(first * row, count * row), count, x.cols)

    def best_logits(self, logits: Matrix, count: int, columns: int) -> BestLogits | None:
        """Chosen on the device, so that `count` numbers of each row cross the bus and not all of them."""
        with self.memory.workspace.scope():
            values, ids = self._results.read(self._best(logits, count, columns), "best logits")
        found = BestLogits(values, ids.view(np.int32))
        sound = (found.ids >= 0).all() and (found.values < np.finfo(np.float32).max).all()
        return found if sound else None

    def verify_drafts(
        self, logits: Matrix, drafts: Sequence[DraftRows], count: int, columns: int
    ) -> list[Verified]:
        """Drawn on the device: two numbers of each request cross the bus, however long its draft is."""
        with self.memory.workspace.scope() as room:
            values, ids = self._best(logits, count, columns)
            tables = draft_tables(drafts, logits.rows, self.memory.uploads, room)
            accepted, tokens = (self.new_matrix(1, len(drafts), what) for what in ("accepted", "drawn"))
            self.launch(self.kernels.verify_draft(values, ids, tables, accepted, tokens))
            self.memory.uploads.end()
            found = self._results.read([accepted, tokens], "verified drafts")
        counts, drawn = (matrix[0].view(np.int32).tolist() for matrix in found)
        return list(map(Verified, counts, drawn))

    def _best(self, logits: Matrix, count: int, columns: int) -> tuple[Matrix, Matrix]:
        values, ids = (self.new_matrix(logits.rows, count, what) for what in ("best logits", "their ids"))
        with self.memory.workspace.scope() as scratch:
            self.launch(self.kernels.head_topk(logits, columns, values, ids, scratch))
        return values, ids

    @property
    def metrics(self) -> HybridMetrics | None:
        """The counters themselves, which go on counting; None for a model without routed experts."""
        if self.spec.experts is None:
            return None
        flow, guesses = self.flow, self.prefetcher.metrics
        counters = flow.metrics, flow.split.metrics, guesses, self.cache.statistics
        return HybridMetrics(*counters, self.memory.queue.statistics)

    def check_integrity(self) -> None:
        """AssertionError when region, transfers or expert cache are not sound."""
        self.memory.check_integrity()
        self.cache.check_integrity()

    def close(self) -> None:
        """Let what is on the bus arrive and unlock the experts' memory. Close the device next."""
        if hasattr(self, "memory"):
            self.memory.queue.drain()
            self.source.close()

    # Inside

    def _settle_slots(self) -> None:
        """Between two passes: experts that have arrived, or that the device has done with, may be evicted."""
        self.memory.queue.poll()
        self.loader.settle()
        if self.device.query(self.memory.compute):
            self.flow.release()

    def _begin(self, layers: Sequence[Layer], batch: Batch) -> None:
        self._step += 1
        self.cache.begin_step()
        self.source.know([layer.ffn.experts.bank for layer in layers if isinstance(layer.ffn, RoutedFfn)])
        if self._step == 0 and self.options.heat is not None:
            self.loader.warm(self.options.heat)
        self._prepare(batch, list({layer.attention.spec.rope for layer in layers}))
        few = self.options.graphs and batch.rows <= DECODE_TOKENS and isinstance(self._kv, DeviceKv)
        self.graphs.begin(batch if few else None)
        counts = np.array([sequence.count for sequence in batch.sequences])
        self._decoding = np.repeat(counts <= DECODE_TOKENS, counts)
        if self.spec.experts is not None:
            banks = [
                (self._step * len(layers) + index, layer.ffn.experts.bank)
                for index, layer in enumerate(layers)
                if isinstance(layer.ffn, RoutedFfn)
            ]
            prompt = not self._decoding.all()
            base = base_seconds(self.spec, self.kv, batch, self.options.speeds)
            top_k = self.spec.experts.router.top_k
            self.flow.stream.begin(banks if prompt else [], batch.rows, top_k, base)

    def _end(self) -> None:
        """Experts that were missed come in the background, as many as a step may bring."""
        self.label = "logits"
        self.memory.uploads.end()
        for claim in self.cache.admit_misses():
            due = (self._step + 1) * self.spec.layers + claim.expert.layer
            self.loader.load(claim, Priority.SPECULATIVE, due)
        self.memory.queue.pump()

    def _to_router(
        self, residual: Matrix, layer: Layer, cache: Any, batch: Batch
    ) -> tuple[Matrix, DeviceRoutes] | None:
        """Attention, and the router's choice for the normed rows; or attention and a dense FFN."""
        with self.memory.workspace.scope():
            self.attend(residual, layer.attention, cache, batch)
        if isinstance(layer.ffn, RoutedFfn):
            return self.norm_and_route(residual, layer.ffn.router)
        self.feed_forward(residual, layer.ffn)
        return None

    def _routed(
        self,
        residual: Matrix,
        part: RoutedFfn,
        chosen: tuple[Matrix, DeviceRoutes],
        after: Layer | None,
        due: int,
    ) -> NDArray[np.int32]:
        """residual += experts; returns the choice. The shared expert computes while the choice travels."""
        (hidden, routes), experts = chosen, part.experts
        host_may_compute = self.options.misses != "fetch" and not self.flow.stream.all
        self.readback.start(routes, hidden if host_may_compute else None)
        shared = self._shared(hidden, experts)
        self.prefetcher.collect()
        read = self.readback.finish()
        self.flow.release()
        self.prefetcher.judge(experts.bank.layer, read.ids)
        call = ExpertCall(
            hidden, read.hidden, routes, read.ids, read.weights, experts.bank, experts.gating, self._decoding
        )
        flow = self.flow.begin(call, due, branch=Branch(residual, experts.scale, shared))
        self._guess(residual, after, experts.bank.layer + 1, due + 1)
        self.flow.finish(flow)
        self.prefetcher.collect()
        return read.ids

    def _guess(self, residual: Matrix, after: Layer | None, layer: int, due: int) -> None:
        """Ask the next layer's router early, when it has one and tokens are being decoded."""
        if self.options.prefetch > 1 or after is None or not isinstance(after.ffn, RoutedFfn):
            return
        if self._decoding.all():
            self.prefetcher.ask(residual, after.ffn.router, layer, due)

    def _shared(self, hidden: Matrix, part: Experts) -> Matrix | None:
        if part.shared is None:
            return None
        shared: Matrix = self._dense(hidden, part.shared)
        if part.shared_gate is None:
            return shared
        return self.scaled_by_sigmoid(shared, self.plain_linear(hidden, part.shared_gate))
