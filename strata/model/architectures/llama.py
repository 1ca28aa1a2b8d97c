"""llama (Llama 2 and 3, SmolLM2), mistral and granite (llama with four multipliers): dense decoders."""

from __future__ import annotations

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.names import GGUF, HF
from strata.model.architectures.rope import hf_rope
from strata.plan.spec import ExpertSpec, ModelSpec, RouterSpec


def _no_mlp_bias(config: Fields) -> None:
    config.only("mlp_bias", False, [False])


def llama(config: Fields) -> ModelSpec:
    """transformers' LlamaConfig."""
    _no_mlp_bias(config)
    base = hf.sizes(config)
    bias = config.flag("attention_bias", False)
    rope = hf_rope(config, base.head_dim, base.context)
    attention = hf.grouped_query(base, rope, qkv_bias=bias, out_bias=bias)
    return hf.model(config, "llama", base, attention, dense_width=hf.dense_width(config))


def mistral(config: Fields) -> ModelSpec:
    """transformers' MistralConfig: llama, and a window over all layers unless it is null."""
    base = hf.sizes(config, kv_heads=8)
    rope = hf_rope(config, base.head_dim, base.context)
    attention = hf.grouped_query(base, rope, sliding_window=window_everywhere(config, base.layers, 4096))
    return hf.model(config, "mistral", base, attention, dense_width=hf.dense_width(config))


def window_everywhere(config: Fields, layers: int, absent: int) -> tuple[int, ...]:
    """sliding_window for every layer; an explicit null is none, an absent key the family's default."""
    if not config.has("sliding_window") and (config.prefix + "sliding_window" in config.values or not absent):
        return ()
    return (config.integer("sliding_window", absent),) * layers


def granite(config: Fields) -> ModelSpec:
    """transformers' GraniteConfig: llama with multipliers."""
    _no_mlp_bias(config)
    base = hf.sizes(config)
    bias = config.flag("attention_bias", False)
    rope = hf_rope(config, base.head_dim, base.context)
    scale = config.number("attention_multiplier", 1.0, 1e-9, 1e6)
    attention = hf.grouped_query(base, rope, qkv_bias=bias, out_bias=bias, scale=scale)
    return hf.model(
        config, "granite", base, attention, dense_width=hf.dense_width(config), **multipliers(config)
    )


def multipliers(config: Fields) -> dict[str, float]:
    """Granite's multipliers as ModelSpec fields; logits are divided by logits_scaling."""
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0, 1e-9, 1e6),
        "residual_scale": config.number("residual_multiplier", 1.0, 1e-9, 1e6),
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0, 1e-9, 1e6),
    }


def gguf_llama(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's llama: dense, or Mixtral when expert_count is above 0."""
    base = gguf.sizes(meta, tensors)
    window = (meta.integer("attention.sliding_window"),) * base.layers if window_set(meta) else ()
    attention = gguf.grouped_query(meta, base, tensors, rotated=True, sliding_window=window)
    experts = gguf.expert_count(meta)
    if not experts:
        return gguf.model(meta, "llama", base, attention, dense_width=gguf.dense_width(meta))
    router = RouterSpec(experts, gguf.top_k(meta))
    spec = hf.check_experts(meta.source, ExpertSpec(router, gguf.dense_width(meta)))
    return gguf.model(meta, "mixtral", base, attention, moe_layers=(True,) * base.layers, experts=spec)


def window_set(meta: Fields) -> bool:
    """Whether a sliding window is written (0 stands for none)."""
    return bool(meta.raw("attention.sliding_window"))


def gguf_granite(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's granite."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, rotated=True, scale=gguf.attention_scale(meta, base))
    width = gguf.dense_width(meta)
    return gguf.model(meta, "granite", base, attention, dense_width=width, **gguf.multipliers(meta))


ARCHITECTURES = (
    Architecture(("llama",), llama, HF, "llama", gguf_llama, GGUF, gguf_rotated=True),
    Architecture(("mistral",), mistral, HF),
    Architecture(("granite",), granite, HF, "granite", gguf_granite, GGUF, gguf_rotated=True),
)
