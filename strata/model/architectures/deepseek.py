"""deepseek_v2 and deepseek_v3 (also Kimi-K2): latent attention, shared experts, grouped routers."""

from __future__ import annotations

from dataclasses import replace

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_EXPERTS, MAX_HEAD_DIM, Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.glm import (
    gguf_shared_width,
    gguf_sigmoid_router,
    grouped_sigmoid_router,
    leading_dense,
)
from strata.model.architectures.names import GGUF, HF, HF_SHARED
from strata.model.architectures.rope import gguf_rope, hf_rope, hf_rope_section, yarn_mscale
from strata.plan.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec, RouterSpec


def _attention(config: Fields, base: hf.Sizes, interleaved: bool) -> AttentionSpec:
    config.only("attention_bias", False, [False])
    rope_dim = config.integer("qk_rope_head_dim", 64, high=MAX_HEAD_DIM)
    without_lora = "q_lora_rank" in config.values and not config.has("q_lora_rank")
    mla = MlaSpec(
        q_lora_rank=0 if without_lora else config.integer("q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        qk_nope_head_dim=config.integer("qk_nope_head_dim", 128, high=MAX_HEAD_DIM),
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim", 128, high=MAX_HEAD_DIM),
    )
    rope = hf_rope(config, rope_dim, base.context, interleaved=interleaved)
    temperature = 1.0
    mscale = hf_rope_section(config).number("mscale_all_dim", 0.0, 0.0, 100.0)
    if rope.type != "default" and mscale:
        temperature = yarn_mscale(rope.factor, mscale)
    return _latent(base, mla, rope, temperature)


def _latent(base: hf.Sizes, mla: MlaSpec, rope: RopeSpec, temperature: float) -> AttentionSpec:
    """YaRN's temperature multiplies queries and keys, so the scale of their product by its square."""
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    scale = head_dim**-0.5 * temperature * temperature
    return AttentionSpec(base.heads, base.heads, head_dim, scale, rope, mla=mla)


def _model(
    config: Fields,
    name: str,
    base: hf.Sizes,
    attention: AttentionSpec,
    router: RouterSpec,
    defaults: tuple[int, int],
) -> ModelSpec:
    """defaults: the family's number of leading dense layers and of shared experts."""
    width = config.integer("moe_intermediate_size")
    shared = width * config.integer("n_shared_experts", defaults[1], low=0, high=64)
    layers = leading_dense(config, base.layers, defaults[0])
    experts = hf.check_experts(config.source, ExpertSpec(router, width, shared_width=shared))
    return hf.model(
        config,
        name,
        base,
        attention,
        dense_width=0 if all(layers) else hf.dense_width(config),
        moe_layers=layers,
        experts=experts,
    )


def deepseek_v2(config: Fields) -> ModelSpec:
    """transformers' DeepseekV2Config: softmax scores, optionally limited to the best groups."""
    config.only("scoring_func", "softmax", ["softmax"])
    config.only("mlp_bias", False, [False])
    # transformers ignores the flag, DeepSeek's own code then leaves out the scaling: no common meaning.
    config.only("norm_topk_prob", False, [False])
    config.only("topk_method", "greedy", ["greedy", "group_limited_greedy"])
    grouped = config.text("topk_method", "greedy") == "group_limited_greedy"
    router = RouterSpec(
        hf.expert_count(config, "n_routed_experts"),
        config.integer("num_experts_per_tok", high=MAX_EXPERTS),
        normalize=False,
        scale=config.number("routed_scaling_factor", 1.0, 0.0, 1e6),
        groups=config.integer("n_group", high=MAX_EXPERTS) if grouped else 1,
        top_groups=config.integer("topk_group", high=MAX_EXPERTS) if grouped else 1,
    )
    base = hf.sizes(config)
    return _model(config, "deepseek_v2", base, _attention(config, base, True), router, (0, 2))


def deepseek_v3(config: Fields) -> ModelSpec:
    """transformers' DeepseekV3Config; Kimi-K2's config.json is one under another model_type."""
    classes = config.items("architectures") or ["DeepseekV3ForCausalLM"]
    if "DeepseekV3ForCausalLM" not in classes:
        raise config.unsupported(f"the class {classes[0]}")
    base = hf.sizes(config)
    attention = _attention(config, base, config.flag("rope_interleave", True))
    return _model(config, "deepseek_v3", base, attention, grouped_sigmoid_router(config, 8, 4, 2.5), (3, 1))


def gguf_deepseek2(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's deepseek2: DeepSeek V2, V3 and Kimi-K2; expert_gating_func tells which router."""
    base = gguf.sizes(meta, tensors)
    sigmoid = meta.integer("expert_gating_func", 1, low=0, high=2) == 2
    router = gguf_sigmoid_router(meta) if sigmoid else _gguf_softmax_router(meta)
    width = gguf.expert_width(meta)
    experts = ExpertSpec(router, width, shared_width=gguf_shared_width(meta, width))
    name = "deepseek_v3" if sigmoid else "deepseek_v2"
    return gguf.moe(meta, name, base, _gguf_attention(meta, base, tensors), experts)


def _gguf_softmax_router(meta: Fields) -> RouterSpec:
    sigmoid_like = gguf_sigmoid_router(
        Fields({**meta.values, meta.prefix + "expert_gating_func": 2}, meta.source, meta.prefix)
    )
    return replace(
        sigmoid_like,
        score="softmax",
        normalize=meta.flag("expert_weights_norm", False),
        select_bias=False,
        group_score="max",
    )


def _gguf_attention(meta: Fields, base: hf.Sizes, tensors: Tensors) -> AttentionSpec:
    """Files from 2025 on (with attn_k_b) describe the absorbed form; the head sizes are in *_mla keys."""
    rope_dim = meta.integer("rope.dimension_count", high=MAX_HEAD_DIM)
    key = meta.integer("attention.key_length_mla", meta.raw("attention.key_length"), high=MAX_HEAD_DIM)
    value = meta.integer("attention.value_length_mla", meta.raw("attention.value_length"), high=MAX_HEAD_DIM)
    mla = MlaSpec(
        q_lora_rank=meta.integer("attention.q_lora_rank", 0, low=0),
        kv_lora_rank=meta.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=Fields({"key_length": key - rope_dim}, meta.source).integer("key_length"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=value,
    )
    rope = gguf_rope(meta, rope_dim, base.context, tensors, interleaved=True, fixed_temperature=True)
    # The key holds 0.1 * mscale_all_dim.
    mscale = meta.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 10.0) * 10.0
    return _latent(base, mla, rope, yarn_mscale(rope.factor, mscale) if rope.type == "yarn" else 1.0)


_HF = {
    **HF,
    **HF_SHARED,
    "q_a": "model.layers.{i}.self_attn.q_a_proj",
    "q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm",
    "q_b": "model.layers.{i}.self_attn.q_b_proj",
    "kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
    "kv_b": "model.layers.{i}.self_attn.kv_b_proj",
}
_GGUF = {
    **GGUF,
    "q_a": "blk.{i}.attn_q_a",
    "q_a_norm": "blk.{i}.attn_q_a_norm",
    "q_b": "blk.{i}.attn_q_b",
    "kv_a": "blk.{i}.attn_kv_a_mqa",
    "kv_a_norm": "blk.{i}.attn_kv_a_norm",
    "kv_b": "blk.{i}.attn_kv_b",
    "k_b": "blk.{i}.attn_k_b",
    "v_b": "blk.{i}.attn_v_b",
}
ARCHITECTURES = (
    Architecture(("deepseek_v2",), deepseek_v2, _HF, "deepseek2", gguf_deepseek2, _GGUF),
    Architecture(("deepseek_v3", "kimi_k2"), deepseek_v3, _HF),
)
