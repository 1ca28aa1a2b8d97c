"""The feed-forward part of a layer out of a store: one gated FFN for all tokens, or routed experts."""

from __future__ import annotations

from strata.backends.parts import (
    DenseFfn,
    ExpertBank,
    Experts,
    FeedForward,
    Gating,
    RoutedFfn,
    Router,
)
from strata.errors import StoreError
from strata.model.loading import Weights
from strata.plan.spec import ExpertSpec, ModelSpec
from strata.store.formats import padded


def load_ffn(spec: ModelSpec, weights: Weights, layer: int) -> FeedForward | RoutedFfn:
    """The FFN of decoder layer `layer`."""
    if spec.is_moe(layer) and spec.experts is not None:
        return RoutedFfn(
            router=_load_router(spec, spec.experts, weights),
            experts=_load_experts(spec, spec.experts, weights, layer),
        )
    return FeedForward(
        norm=weights.norm("ffn_norm.weight", spec.hidden, spec.norm_eps),
        ffn=_load_dense(spec, weights, "mlp", spec.dense_width),
        scale=spec.residual_scale,
    )


def _load_router(spec: ModelSpec, experts: ExpertSpec, weights: Weights) -> Router:
    router = experts.router
    return Router(
        norm=weights.norm("ffn_norm.weight", spec.hidden, spec.norm_eps),
        spec=router,
        matrix=weights.vector("router.weight", router.experts, spec.hidden),
        bias=weights.vector_if(router.logit_bias, "router.bias", router.experts),
        select_bias=weights.vector_if(router.select_bias, "router.select_bias", router.experts),
    )


def _load_experts(spec: ModelSpec, experts: ExpertSpec, weights: Weights, layer: int) -> Experts:
    shared = experts.shared_width > 0
    return Experts(
        bank=_checked_bank(spec, experts, weights, layer),
        gating=_gating(spec),
        shared=_load_dense(spec, weights, "shared_expert", experts.shared_width) if shared else None,
        shared_gate=weights.vector_if(experts.shared_gate, "shared_expert.gate.weight", 1, spec.hidden),
        scale=spec.residual_scale,
    )


def _load_dense(spec: ModelSpec, weights: Weights, part: str, width: int) -> DenseFfn:
    return DenseFfn(
        gate_up=weights.matrix(f"{part}.gate_up.weight", 2 * padded(width, 8), spec.hidden),
        down=weights.matrix(f"{part}.down.weight", spec.hidden, width),
        width=width,
        gating=_gating(spec),
    )


def _gating(spec: ModelSpec) -> Gating:
    return Gating(spec.activation, spec.activation_alpha, spec.activation_limit)


def _checked_bank(spec: ModelSpec, experts: ExpertSpec, weights: Weights, layer: int) -> ExpertBank:
    """The layer's experts; StoreError when their layout is not the spec's."""
    bank = weights.experts(layer, experts.router.experts)
    found = (bank.layout.hidden, bank.layout.width, bank.layout.biases)
    wanted = (spec.hidden, experts.width, experts.biases)
    if found != wanted:
        raise StoreError(
            f"experts of layer {layer}: hidden, width, biases are {found} in the store, {wanted} in the spec",
            remedy="convert the checkpoint again, or run `strata verify` on the store",
        )
    return bank
