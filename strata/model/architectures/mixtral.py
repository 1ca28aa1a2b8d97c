"""mixtral, olmoe and granitemoe: every layer routes, no shared expert."""

from __future__ import annotations

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_EXPERTS, Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.llama import multipliers, window_everywhere
from strata.model.architectures.names import GGUF, HF, HF_MEMORY, HF_MIXTRAL
from strata.model.architectures.rope import hf_rope
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RouterSpec


def _all_route(
    config: Fields, name: str, base: hf.Sizes, attention: AttentionSpec, router: RouterSpec, **rest: float
) -> ModelSpec:
    experts = hf.check_experts(config.source, ExpertSpec(router, hf.dense_width(config)))
    return hf.model(config, name, base, attention, moe_layers=(True,) * base.layers, experts=experts, **rest)


def mixtral(config: Fields) -> ModelSpec:
    """transformers' MixtralConfig; the chosen weights always sum to 1."""
    base = hf.sizes(config, kv_heads=8)
    rope = hf_rope(config, base.head_dim, base.context, theta=1e6)
    attention = hf.grouped_query(base, rope, sliding_window=window_everywhere(config, base.layers, 0))
    router = RouterSpec(
        hf.expert_count(config, "num_local_experts", "num_experts"),
        config.integer("num_experts_per_tok", 2, high=MAX_EXPERTS),
    )
    return _all_route(config, "mixtral", base, attention, router)


def olmoe(config: Fields) -> ModelSpec:
    """transformers' OlmoeConfig: RMSNorm over all heads of q and k, optional clipping."""
    base = hf.sizes(config)
    bias = config.flag("attention_bias", False)
    clip = config.number("clip_qkv", low=1e-6, high=1e6) if config.has("clip_qkv") else None
    attention = hf.grouped_query(
        base,
        hf_rope(config, base.head_dim, base.context),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full",
        clip_qkv=clip,
    )
    router = RouterSpec(
        hf.expert_count(config, "num_experts", "num_local_experts"),
        config.integer("num_experts_per_tok", 8, high=MAX_EXPERTS),
        normalize=config.flag("norm_topk_prob", False),
    )
    return _all_route(config, "olmoe", base, attention, router)


def granitemoe(config: Fields) -> ModelSpec:
    """transformers' GraniteMoeConfig: softmax over the chosen logits, four multipliers."""
    base = hf.sizes(config)
    bias = config.flag("attention_bias", False)
    scale = config.number("attention_multiplier", 1.0, 1e-9, 1e6)
    rope = hf_rope(config, base.head_dim, base.context)
    attention = hf.grouped_query(base, rope, qkv_bias=bias, out_bias=bias, scale=scale)
    router = RouterSpec(
        hf.expert_count(config, "num_local_experts"),
        config.integer("num_experts_per_tok", 2, high=MAX_EXPERTS),
        score="softmax_topk",
        normalize=False,
    )
    return _all_route(config, "granitemoe", base, attention, router, **multipliers(config))


def gguf_olmoe(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's olmoe: weights are not normalised unless the metadata say so."""
    base = gguf.sizes(meta, tensors)
    clip = meta.number("attention.clamp_kqv", 0.0, 0.0, 1e6) or None
    attention = gguf.grouped_query(meta, base, tensors, qk_norm="full", clip_qkv=clip)
    normalize = meta.flag("expert_weights_norm", False)
    router = RouterSpec(gguf.expert_count(meta), gguf.top_k(meta), normalize=normalize)
    return gguf.moe(meta, "olmoe", base, attention, ExpertSpec(router, gguf.expert_width(meta)))


def gguf_granitemoe(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's granitemoe; a shared expert is there when its width is written."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, rotated=True, scale=gguf.attention_scale(meta, base))
    router = RouterSpec(gguf.expert_count(meta), gguf.top_k(meta), score="softmax_topk", normalize=False)
    shared = meta.integer("expert_shared_feed_forward_length", 0, low=0)
    experts = ExpertSpec(router, gguf.expert_width(meta), shared_width=shared)
    return gguf.moe(meta, "granitemoe", base, attention, experts, **gguf.multipliers(meta))


_GRANITE = {
    **HF,
    "router": "model.layers.{i}.block_sparse_moe.router.layer",
    "experts.gate_up": "model.layers.{i}.block_sparse_moe.input_linear.weight",
    "experts.down": "model.layers.{i}.block_sparse_moe.output_linear.weight",
}
_GRANITE_MEMORY = {
    **HF,
    "router": "model.layers.{i}.block_sparse_moe.router",
    "experts.gate_up": "model.layers.{i}.block_sparse_moe.experts.gate_up_proj",
    "experts.down": "model.layers.{i}.block_sparse_moe.experts.down_proj",
}
ARCHITECTURES = (
    # llama.cpp reads Mixtral as "llama" with experts.
    Architecture(("mixtral",), mixtral, HF_MIXTRAL, hf_memory_names=HF_MEMORY),
    Architecture(("olmoe",), olmoe, HF, "olmoe", gguf_olmoe, GGUF),
    Architecture(
        ("granitemoe",),
        granitemoe,
        _GRANITE,
        "granitemoe",
        gguf_granitemoe,
        GGUF,
        gguf_rotated=True,
        hf_memory_names=_GRANITE_MEMORY,
    ),
)
