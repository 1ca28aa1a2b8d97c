"""gpt_oss: sinks, windows on every second layer, biases everywhere, clamped SwiGLU, MXFP4 experts."""

from __future__ import annotations

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_EXPERTS, Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.names import GGUF, HF
from strata.model.architectures.rope import hf_rope
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RouterSpec

# GptOssConfig's RoPE where a config.json says nothing.
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


def gpt_oss(config: Fields) -> ModelSpec:
    """transformers' GptOssConfig."""
    if not config.raw("rope_scaling") and not config.raw("rope_parameters"):
        config = Fields({**config.values, "rope_parameters": _DEFAULT_ROPE}, config.source)
    base = hf.sizes(config, kv_heads=8, head_dim=64)
    bias = config.flag("attention_bias", True)
    window = config.integer("sliding_window", 128)
    attention = hf.grouped_query(
        base,
        hf_rope(config, base.head_dim, base.context, theta=150000.0),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        sliding_window=hf.windows(config, base.layers, window, _alternating(base.layers)),
    )
    top_k = config.integer("num_experts_per_tok", config.raw("experts_per_token") or 4, high=MAX_EXPERTS)
    router = _router(hf.expert_count(config, "num_local_experts", "num_experts"), top_k)
    experts = hf.check_experts(config.source, ExpertSpec(router, hf.dense_width(config), biases=True))
    alpha = config.number("swiglu_alpha", 1.702, 0.0, 1e3)
    limit = config.number("swiglu_limit", 7.0, 1e-3, 1e6)
    return _model(config, base, attention, experts, alpha, limit)


def _router(experts: int, top_k: int) -> RouterSpec:
    return RouterSpec(experts, top_k, score="softmax_topk", normalize=False, logit_bias=True)


def _model(
    config: Fields, base: hf.Sizes, attention: AttentionSpec, experts: ExpertSpec, alpha: float, limit: float
) -> ModelSpec:
    return hf.model(
        config,
        "gpt_oss",
        base,
        attention,
        moe_layers=(True,) * base.layers,
        experts=experts,
        activation="swiglu_clamped",
        activation_alpha=alpha,
        activation_limit=limit,
    )


def gguf_gpt_oss(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's gpt-oss. The model's YaRN ramp is not rounded to whole dimensions (truncate false)."""
    base = gguf.sizes(meta, tensors)
    window = meta.integer("attention.sliding_window", 128)
    attention = gguf.grouped_query(
        meta,
        base,
        tensors,
        truncate=False,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        sliding_window=tuple(0 if i % 2 else window for i in range(base.layers)),
    )
    router = _router(gguf.expert_count(meta), gguf.top_k(meta))
    experts = hf.check_experts(meta.source, ExpertSpec(router, gguf.expert_width(meta), biases=True))
    name = Fields(meta.values, meta.source).text("general.name", "gpt_oss")
    return _model(Fields({"_name_or_path": name}, meta.source), base, attention, experts, 1.702, 7.0)


_HF = {
    **HF,
    "sinks": "model.layers.{i}.self_attn.sinks",
    "router": "model.layers.{i}.mlp.router",
}
_GGUF = {**GGUF, "ffn_norm": "blk.{i}.post_attention_norm", "sinks": "blk.{i}.attn_sinks.weight"}
ARCHITECTURES = (
    Architecture(("gpt_oss",), gpt_oss, _HF, "gpt-oss", gguf_gpt_oss, _GGUF, quantizations=("mxfp4",)),
)
