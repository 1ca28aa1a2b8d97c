"""The CPU backend's fused ops: each runs a part of a decoder layer in one C++ call."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.cpu_kv import CpuKvCache
from strata.backends.cpu_tokens import TokenOps
from strata.backends.cpu_weights import CpuWeight, WeightOps
from strata.backends.parts import (
    Attention,
    Experts,
    FeedForward,
    GroupedQueryAttention,
    Layer,
    Model,
    Norm,
    RoutedFfn,
    Router,
    Routes,
    Routing,
    StackedIds,
)
from strata.core import Batch
from strata.plan.spec import RopeSpec

F32 = NDArray[np.float32]


class LayerOps(TokenOps, WeightOps):
    """Part of CpuBackend. Every op computes bit for bit what the elementary ops would one after the other."""

    ops: ModuleType

    def __init__(self) -> None:
        super().__init__()
        self._step: tuple[Batch, CpuKvCache, RopeSpec, Any] | None = None
        # Scratch of the ops that return more than a few bytes; see `_scratch`.
        self._hidden = self._logits = np.empty((0, 0), np.float32)

    def forward(self, model: Model, batch: Batch, cache: CpuKvCache) -> tuple[Routes, F32 | None]:
        """A whole pass in one call: each way back to Python is one on cold caches."""
        handle, routed = self._layers_handle(model.layers)
        step = self._step_of(batch, cache, model.layers[0].attention.spec.rope)
        norm, head, rows = model.final_norm, model.head, batch.logit_rows
        out = self._logits = _scratch(self._logits, (len(rows), head.rows))
        ids, used = self.ops.forward(
            self.cpu,
            model.embed.packed,
            np.ascontiguousarray(batch.token_ids, dtype=np.int32),
            model.scale,
            handle,
            step,
            rows,
            norm.weight,
            norm.eps,
            head.packed,
            out,
            self.exact,
        )
        return self._routes(routed, ids, used), out if len(rows) else None

    def run_layers(self, residual: F32, layers: Sequence[Layer], cache: CpuKvCache, batch: Batch) -> Routes:
        """residual through all layers, in one call."""
        handle, routed = self._layers_handle(layers)
        step = self._step_of(batch, cache, layers[0].attention.spec.rope)
        ids, used = self.ops.run_layers(self.cpu, handle, step, residual, self.exact)
        return self._routes(routed, ids, used)

    def _routes(self, layers: list[int], ids: NDArray[np.int32], used: list[int]) -> Routes:
        return Routes(StackedIds(layers, ids), dict(zip(layers, used, strict=True)))

    def attend(self, residual: F32, part: Attention, cache: CpuKvCache, batch: Batch) -> None:
        """residual += attention."""
        step = self._step_of(batch, cache, part.spec.rope)
        self.ops.attend(self.cpu, self._attention_handle(part), step, residual, self.exact)

    def feed_forward(self, residual: F32, part: FeedForward) -> None:
        """residual += FFN."""
        handle = self._handles.of(part, self.ops.FeedForward)
        self.ops.feed_forward(self.cpu, handle, residual, self.exact)

    def choose_experts(self, residual: F32, part: Router) -> Routing:
        """The routing of every row; `hidden` is scratch of this backend."""
        hidden = self._hidden = _scratch(self._hidden, residual.shape)
        handle = self._handles.of(part, self.ops.Router)
        return Routing(hidden, *self.ops.choose_experts(self.cpu, handle, residual, hidden))

    def apply_experts(self, residual: F32, routing: Routing, part: Experts) -> None:
        """residual += routed experts + shared expert."""
        self.ops.apply_experts(self.cpu, self._experts_handle(part), *routing, residual, self.exact)

    def logits(self, residual: F32, rows: NDArray[np.int32], norm: Norm, head: CpuWeight) -> F32:
        """Logits of some rows, in scratch of this backend."""
        out = self._logits = _scratch(self._logits, (len(rows), head.rows))
        self.ops.logits(self.cpu, residual, rows, norm.weight, norm.eps, head.packed, out, self.exact)
        return out

    def _attention_handle(self, part: Attention) -> Any:
        kind = self.ops.GroupedQuery if isinstance(part, GroupedQueryAttention) else self.ops.Latent
        return self._handles.of(part, kind)

    def _experts_handle(self, part: Experts) -> Any:
        return self._handles.of(part, lambda made: self.ops.Experts(made, self._table(made.bank)))

    def _layers_handle(self, layers: Sequence[Layer]) -> tuple[Any, list[int]]:
        """All layers for C++, and the indices of those that route. Kept as long as the first one lives."""
        made = self._handles.of(layers[0], lambda _: {})
        ends = len(layers), id(layers[-1])  # a list that begins with the same layer may be another
        if ends not in made:
            native = self.ops.Layers([self._layer_handles(layer) for layer in layers])
            routed = [i for i, layer in enumerate(layers) if isinstance(layer.ffn, RoutedFfn)]
            made[ends] = native, routed
        found: tuple[Any, list[int]] = made[ends]
        return found

    def _layer_handles(self, layer: Layer) -> tuple[Any, ...]:
        attention = self._attention_handle(layer.attention)
        if isinstance(layer.ffn, FeedForward):
            return attention, self._handles.of(layer.ffn, self.ops.FeedForward)
        router = self._handles.of(layer.ffn.router, self.ops.Router)
        return attention, router, self._experts_handle(layer.ffn.experts)

    def _step_of(self, batch: Batch, cache: CpuKvCache, rope: RopeSpec) -> Any:
        """The batch for C++: made and checked once, not once per layer."""
        made = self._step
        if made is None or made[0] is not batch or made[1] is not cache or made[2] is not rope:
            tables = self._rope.of(rope, batch)
            step = self.ops.Step(cache.handle, self._sequences_of(batch), batch.rows, *tables)
            made = self._step = (batch, cache, rope, step)
        return made[3]


def _scratch(array: F32, shape: tuple[int, ...]) -> F32:
    """`array`, or another when another shape is wanted. The old one lives on where it is still used."""
    return array if array.shape == shape else np.empty(shape, np.float32)
