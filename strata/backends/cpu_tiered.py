"""The CPU backend's experts when memory is a cache of the disk: layer by layer, as records come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.backends.composed import ComposedOps
from strata.backends.cpu_kv import CpuKvCache
from strata.backends.cpu_layers import LayerOps
from strata.backends.cpu_weights import as_gating, as_record_shape
from strata.backends.parts import (
    ExpertBank,
    Experts,
    FeedForward,
    Gating,
    Layer,
    Model,
    RoutedFfn,
    Routes,
    Routing,
)
from strata.core import Batch
from strata.memory.expert_host import HostExperts

F32 = NDArray[np.float32]
Records = Iterable[Mapping[int, NDArray[np.uint8]]]

DECODE_ROWS = 16
"""Up to so many rows a step counts as decoding: the cache learns from it, and experts are computed in the
order in which they come. Outputs wait for their turn in the sum; of a long prompt they would be too many, so
its experts are taken in order."""

GUESS_ROWS = 4
"""Of more rows the experts are too many to be read ahead."""


class TieredOps(LayerOps, ComposedOps):
    """Part of CpuBackend. Without a tier its ops are those of LayerOps; with one they give the same bits."""

    def forward(self, model: Model, batch: Batch, cache: CpuKvCache) -> tuple[Routes, F32 | None]:
        """A whole pass: in one call, or layer by layer."""
        if _tier_of(model.layers) is None:
            return LayerOps.forward(self, model, batch, cache)
        return ComposedOps.forward(self, model, batch, cache)

    def run_layers(self, residual: F32, layers: Sequence[Layer], cache: CpuKvCache, batch: Batch) -> Routes:
        """residual through all layers: in one call, or layer by layer where experts must be brought."""
        if _tier_of(layers) is None:
            return LayerOps.run_layers(self, residual, layers, cache, batch)
        return self._run_tiered(residual, layers, cache, batch)

    def apply_experts(self, residual: F32, routing: Routing, part: Experts) -> None:
        """residual += routed experts + shared expert."""
        if part.bank.tier is None:
            LayerOps.apply_experts(self, residual, routing, part)
        else:
            ComposedOps.apply_experts(self, residual, routing, part)

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
        if bank.tier is None:
            return LayerOps.experts(self, x, ids, weights, bank, gating, active)
        wanted = np.unique(ids).tolist() if active is None else list(active)
        long = len(ids) > DECODE_ROWS
        with bank.bring(wanted, passing=long, ordered=long) as arriving:
            return self._sum_experts(Routing(x, ids, weights), bank, gating, wanted, arriving)

    def _run_tiered(self, residual: F32, layers: Sequence[Layer], cache: CpuKvCache, batch: Batch) -> Routes:
        ids, used = dict[int, NDArray[np.int32]](), dict[int, int]()
        for index, layer in enumerate(layers):
            self.attend(residual, layer.attention, cache, batch)
            if isinstance(layer.ffn, FeedForward):
                self.feed_forward(residual, layer.ffn)
                continue
            routing = self.choose_experts(residual, layer.ffn.router)
            wanted = np.unique(routing.ids)
            ids[index], used[index] = routing.ids, len(wanted)
            following = layers[index + 1] if index + 1 < len(layers) else None
            self._apply_tiered(residual, routing, layer.ffn.experts, wanted.tolist(), following)
        return Routes(ids, used)

    def _apply_tiered(
        self, residual: F32, routing: Routing, part: Experts, wanted: list[int], following: Layer | None
    ) -> None:
        """residual += routed experts + shared expert. following: the layer whose experts come next."""
        long = len(residual) > DECODE_ROWS
        with part.bank.bring(wanted, passing=long, ordered=long) as arriving:
            if following is not None and len(residual) <= GUESS_ROWS:
                self._foresee(residual, following)
            output = self._sum_experts(routing, part.bank, part.gating, wanted, arriving)
        self._join_experts(residual, output, routing, part)

    def _foresee(self, residual: F32, layer: Layer) -> None:
        """Guess a layer's experts by its router on what it will read, but for this layer's experts."""
        if not isinstance(layer.ffn, RoutedFfn):
            return
        bank, router = layer.ffn.experts.bank, self._handles.of(layer.ffn.router, self.ops.Router)
        if bank.tier is None or not bank.tier.foresight.wants(bank.layer):
            return
        unread = np.empty_like(residual)  # not the scratch that the experts of this layer read
        ids, weights = self.ops.choose_experts(self.cpu, router, residual, unread)
        ranked = ids.reshape(-1)[np.argsort(-weights.reshape(-1), kind="stable")]
        bank.tier.expect(bank.layer, list(dict.fromkeys(ranked.tolist())))

    def _sum_experts(
        self, routing: Routing, bank: ExpertBank, gating: Gating, wanted: list[int], arriving: Records
    ) -> F32:
        """Each group of experts is computed as it comes; sums are made in ascending order."""
        shape, kind = as_record_shape(self.ops, bank.layout), as_gating(self.ops, gating)
        split = self.ops.SplitExperts(shape, bank.count, routing.ids, routing.weights, wanted)
        for group in arriving:
            records = list(group.values())
            split.compute(self.cpu, routing.hidden, list(group), records, kind, self.exact)
        output: F32 = split.sum()
        return output


def _tier_of(layers: Sequence[Layer]) -> HostExperts | None:
    """What brings the experts of all layers that route, if anything."""
    for layer in layers:
        if isinstance(layer.ffn, RoutedFfn):
            return layer.ffn.experts.bank.tier
    return None
