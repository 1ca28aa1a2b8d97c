"""glm4_moe (GLM-4.5, 4.6) and minimax_m2: sigmoid routers with a correction bias, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.names import GGUF, HF, HF_MEMORY, HF_MIXTRAL, HF_SHARED
from strata.model.architectures.rope import hf_partial, hf_rope
from strata.plan.spec import ExpertSpec, ModelSpec, RouterSpec

# What DeepSeek's and GLM's code adds to the sum that chosen weights are divided by.
NORMALIZE_EPS = 1e-20


def grouped_sigmoid_router(config: Fields, groups: int, top_groups: int, scale: float) -> RouterSpec:
    """DeepSeek V3's router ("noaux_tc"), which GLM-4.5 shares; the numbers are the family's defaults."""
    config.only("scoring_func", "sigmoid", ["sigmoid"])
    config.only("topk_method", "noaux_tc", ["noaux_tc"])
    return RouterSpec(
        hf.expert_count(config, "n_routed_experts", "num_local_experts", "num_experts"),
        config.integer("num_experts_per_tok", 8, high=MAX_EXPERTS),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        normalize_eps=NORMALIZE_EPS,
        scale=config.number("routed_scaling_factor", scale, 0.0, 1e6),
        select_bias=True,
        groups=config.integer("n_group", groups, high=MAX_EXPERTS),
        top_groups=config.integer("topk_group", top_groups, high=MAX_EXPERTS),
        group_score="top2",
    )


def leading_dense(config: Fields, layers: int, default: int) -> tuple[bool, ...]:
    """The first first_k_dense_replace layers do not route."""
    config.only("moe_layer_freq", 1, [1])
    dense = min(config.integer("first_k_dense_replace", default, low=0, high=MAX_LAYERS), layers)
    return (False,) * dense + (True,) * (layers - dense)


def glm4_moe(config: Fields) -> ModelSpec:
    """transformers' Glm4MoeConfig."""
    base = hf.sizes(config, kv_heads=8)
    rotary = int(base.head_dim * hf_partial(config, 0.5))
    attention = hf.grouped_query(
        base,
        hf_rope(config, rotary, base.context),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "none",
    )
    width = config.integer("moe_intermediate_size", 1408)
    shared = width * config.integer("n_shared_experts", 1, low=0, high=64)
    experts = ExpertSpec(grouped_sigmoid_router(config, 1, 1, 1.0), width, shared_width=shared)
    return hf.model(
        config,
        "glm4_moe",
        base,
        attention,
        dense_width=hf.dense_width(config),
        moe_layers=leading_dense(config, base.layers, 1),
        experts=hf.check_experts(config.source, experts),
    )


def minimax_m2(config: Fields) -> ModelSpec:
    """transformers' MiniMaxM2Config: q and k normed over all heads, first half of each head rotated."""
    for name, needed in (
        ("scoring_func", "sigmoid"),
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("use_routing_bias", True),
        ("shared_intermediate_size", 0),
    ):
        config.only(name, needed, [needed])
    if any(kind != 1 for kind in config.items("attn_type_list") or ()):
        raise config.unsupported("lightning attention (attn_type_list)")
    base = hf.sizes(config, kv_heads=8, head_dim=128)
    partial = hf_partial(
        config, config.integer("rotary_dim", base.head_dim, high=base.head_dim) / base.head_dim
    )
    rope = hf_rope(config, int(base.head_dim * partial), base.context, theta=5e6)
    router = RouterSpec(
        hf.expert_count(config, "num_local_experts", "num_experts"),
        config.integer("num_experts_per_tok", 8, high=MAX_EXPERTS),
        score="sigmoid",
        select_bias=True,
    )
    experts = hf.check_experts(config.source, ExpertSpec(router, hf.dense_width(config)))
    layers = (True,) * base.layers
    attention = hf.grouped_query(base, rope, qk_norm="full")
    return hf.model(config, "minimax_m2", base, attention, moe_layers=layers, experts=experts)


def gguf_sigmoid_router(meta: Fields) -> RouterSpec:
    """Sigmoid scores with a correction bias; 2 is gguf's number of the sigmoid."""
    meta.only("expert_gating_func", 2, [2])
    return RouterSpec(
        gguf.expert_count(meta),
        gguf.top_k(meta),
        score="sigmoid",
        normalize=meta.flag("expert_weights_norm", True),
        normalize_eps=NORMALIZE_EPS,
        # llama.cpp takes 0 for "not scaled".
        scale=meta.number("expert_weights_scale", 1.0, 0.0, 1e6) or 1.0,
        select_bias=True,
        groups=meta.integer("expert_group_count", 1, low=0, high=MAX_EXPERTS) or 1,
        top_groups=meta.integer("expert_group_used_count", 1, low=0, high=MAX_EXPERTS) or 1,
        group_score="top2",
    )


def gguf_shared_width(meta: Fields, width: int) -> int:
    """Width of the shared expert: written, or expert_shared_count times the routed width."""
    count = meta.integer("expert_shared_count", 0, low=0, high=64)
    return meta.integer("expert_shared_feed_forward_length", width * count, low=0)


def gguf_glm4_moe(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's glm4moe."""
    base = gguf.sizes(meta, tensors)
    rotary = meta.integer("rope.dimension_count", base.head_dim // 2, high=MAX_HEAD_DIM)
    meta = Fields({**meta.values, meta.prefix + "rope.dimension_count": rotary}, meta.source, meta.prefix)
    norm = "head" if "blk.0.attn_q_norm.weight" in (tensors or {}) else "none"
    attention = gguf.grouped_query(meta, base, tensors, qk_norm=norm)
    width = gguf.expert_width(meta)
    experts = ExpertSpec(gguf_sigmoid_router(meta), width, shared_width=gguf_shared_width(meta, width))
    return gguf.moe(meta, "glm4_moe", base, attention, experts)


def gguf_minimax_m2(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's minimax-m2."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, qk_norm="full")
    router = replace(gguf_sigmoid_router(meta), normalize_eps=0.0)
    experts = ExpertSpec(router, gguf.expert_width(meta))
    return gguf.moe(meta, "minimax_m2", base, attention, experts)


_GGUF_GLM = {**GGUF, "ffn_norm": "blk.{i}.post_attention_norm"}
ARCHITECTURES = (
    Architecture(("glm4_moe",), glm4_moe, {**HF, **HF_SHARED}, "glm4moe", gguf_glm4_moe, _GGUF_GLM),
    Architecture(
        ("minimax_m2",),
        minimax_m2,
        HF_MIXTRAL,
        "minimax-m2",
        gguf_minimax_m2,
        GGUF,
        hf_memory_names=HF_MEMORY,
    ),
)
