"""The two kinds of feed-forward: one gated FFN for all tokens, or routed experts beside a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Array, Backend, ExpertBank, Gating, Weight
from strata.errors import StoreError
from strata.model.loading import Weights
from strata.plan.spec import ExpertSpec, ModelSpec
from strata.store.formats import padded

Routes = dict[int, NDArray[np.int32]]
"""Expert ids i32 `[rows, top_k]` that the routers of one forward pass chose, by layer."""


class Ffn(Protocol):
    """The feed-forward part of one layer."""

    def forward(self, hidden: Array, routes: Routes) -> Array:
        """Normalized hidden states `[rows, hidden]` -> the FFN branch, same shape; notes its routes."""
        ...


def load_ffn(spec: ModelSpec, weights: Weights, layer: int) -> Ffn:
    """The FFN of decoder layer `layer`."""
    if spec.is_moe(layer) and spec.experts is not None:
        return _load_experts(spec, spec.experts, weights, layer)
    return _load_dense(spec, weights, "mlp", spec.dense_width)


@dataclass(frozen=True)
class DenseFfn:
    """A gated FFN: also the shared expert beside routed ones."""

    ops: Backend
    gate_up: Weight
    down: Weight
    width: int
    gating: Gating

    def forward(self, hidden: Array, routes: Routes) -> Array:
        """See Ffn; routes nothing."""
        return self.apply(hidden)

    def apply(self, hidden: Array) -> Array:
        """`[rows, hidden]` -> `[rows, hidden]`."""
        return self.ops.ffn(hidden, self.gate_up, self.down, self.width, self.gating)


@dataclass(frozen=True)
class ExpertFfn:
    """Routed experts, plus the shared expert where the model has one."""

    ops: Backend
    spec: ExpertSpec
    router: Array
    router_bias: Array | None
    select_bias: Array | None
    bank: ExpertBank
    gating: Gating
    shared: DenseFfn | None
    shared_gate: Array | None

    def forward(self, hidden: Array, routes: Routes) -> Array:
        """See Ffn."""
        ops = self.ops
        logits = ops.plain_linear(hidden, self.router, self.router_bias)
        ids, weights = ops.route(logits, self.spec.router, self.select_bias)
        routes[self.bank.layer] = ids
        output = ops.experts(hidden, ids, weights, self.bank, self.gating)
        if self.shared is not None:
            ops.add(output, self._shared_output(hidden, self.shared))
        return output

    def _shared_output(self, hidden: Array, shared: DenseFfn) -> Array:
        output = shared.apply(hidden)
        if self.shared_gate is None:
            return output
        return self.ops.scaled_by_sigmoid(output, self.ops.plain_linear(hidden, self.shared_gate))


def _gating(spec: ModelSpec) -> Gating:
    return Gating(spec.activation, spec.activation_alpha, spec.activation_limit)


def _load_dense(spec: ModelSpec, weights: Weights, part: str, width: int) -> DenseFfn:
    return DenseFfn(
        ops=weights.backend,
        gate_up=weights.matrix(f"{part}.gate_up.weight", 2 * padded(width, 8), spec.hidden),
        down=weights.matrix(f"{part}.down.weight", spec.hidden, width),
        width=width,
        gating=_gating(spec),
    )


def _load_experts(spec: ModelSpec, experts: ExpertSpec, weights: Weights, layer: int) -> ExpertFfn:
    router = experts.router
    shared = experts.shared_width > 0
    return ExpertFfn(
        ops=weights.backend,
        spec=experts,
        router=weights.vector("router.weight", router.experts, spec.hidden),
        router_bias=weights.vector_if(router.logit_bias, "router.bias", router.experts),
        select_bias=weights.vector_if(router.select_bias, "router.select_bias", router.experts),
        bank=_checked_bank(spec, experts, weights, layer),
        gating=_gating(spec),
        shared=_load_dense(spec, weights, "shared_expert", experts.shared_width) if shared else None,
        shared_gate=weights.vector_if(experts.shared_gate, "shared_expert.gate.weight", 1, spec.hidden),
    )


def _checked_bank(spec: ModelSpec, experts: ExpertSpec, weights: Weights, layer: int) -> ExpertBank:
    """The layer's experts; StoreError when their layout is not the spec's."""
    bank = weights.experts(layer)
    found = (bank.layout.hidden, bank.layout.width, bank.layout.biases)
    wanted = (spec.hidden, experts.width, experts.biases)
    if found != wanted:
        raise StoreError(
            f"experts of layer {layer}: hidden, width, biases are {found} in the store, {wanted} in the spec",
            remedy="convert the checkpoint again, or run `strata verify` on the store",
        )
    return bank
