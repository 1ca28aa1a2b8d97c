"""qwen2, qwen3 (dense), qwen2_moe and qwen3_moe."""

from __future__ import annotations

from strata.model.architectures import gguf, hf
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.llama import window_everywhere
from strata.model.architectures.names import GGUF, HF
from strata.model.architectures.rope import hf_rope
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RouterSpec


def _late_windows(config: Fields, layers: int) -> tuple[int, ...]:
    """qwen2 and qwen3: with use_sliding_window the layers from max_window_layers on have the window."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return hf.windows(config, layers, 0, ["full_attention"] * layers)
    first = config.integer("max_window_layers", 28, low=0, high=1 << 20)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return hf.windows(config, layers, config.integer("sliding_window"), kinds)


def qwen2(config: Fields) -> ModelSpec:
    """transformers' Qwen2Config: biases on q, k, v and none on the output."""
    base = hf.sizes(config, kv_heads=32)
    rope = hf_rope(config, base.head_dim, base.context)
    attention = hf.grouped_query(base, rope, qkv_bias=True, sliding_window=_late_windows(config, base.layers))
    return hf.model(config, "qwen2", base, attention, dense_width=hf.dense_width(config))


def qwen3(config: Fields) -> ModelSpec:
    """transformers' Qwen3Config: RMSNorm over each head of q and k."""
    base = hf.sizes(config, kv_heads=32, head_dim=128)
    bias = config.flag("attention_bias", False)
    attention = hf.grouped_query(
        base,
        hf_rope(config, base.head_dim, base.context),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        sliding_window=_late_windows(config, base.layers),
    )
    return hf.model(config, "qwen3", base, attention, dense_width=hf.dense_width(config))


def _sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Layer i routes when it is not in mlp_only_layers and (i + 1) is a multiple of decoder_sparse_step."""
    step = config.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    dense = list(config.items("mlp_only_layers") or ())
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _softmax_router(config: Fields, experts: int, top_k: int) -> RouterSpec:
    return RouterSpec(
        hf.expert_count(config, "num_experts", "num_local_experts", default=experts),
        config.integer("num_experts_per_tok", top_k, high=MAX_EXPERTS),
        normalize=config.flag("norm_topk_prob", False),
    )


def _early_windows(config: Fields, layers: int) -> tuple[int, ...]:
    """qwen2_moe: with use_sliding_window every second layer below max_window_layers has the window."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return hf.windows(config, layers, 0, ["full_attention"] * layers)
    last = config.integer("max_window_layers", 28, low=0, high=1 << 20)
    kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(layers)]
    return hf.windows(config, layers, config.integer("sliding_window"), kinds)


def qwen2_moe(config: Fields) -> ModelSpec:
    """transformers' Qwen2MoeConfig: a shared expert behind a sigmoid gate."""
    base = hf.sizes(config, kv_heads=16)
    rope = hf_rope(config, base.head_dim, base.context)
    attention = hf.grouped_query(
        base,
        rope,
        qkv_bias=config.flag("qkv_bias", True),
        sliding_window=_early_windows(config, base.layers),
    )
    experts = ExpertSpec(
        _softmax_router(config, 60, 4),
        config.integer("moe_intermediate_size", 1408),
        shared_width=config.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return _moe(config, "qwen2_moe", base, attention, experts)


def qwen3_moe(config: Fields) -> ModelSpec:
    """transformers' Qwen3MoeConfig."""
    base = hf.sizes(config, kv_heads=4)
    bias = config.flag("attention_bias", False)
    window: tuple[int, ...] = ()
    if config.flag("use_sliding_window", False):
        window = window_everywhere(config, base.layers, 4096)
    attention = hf.grouped_query(
        base,
        hf_rope(config, base.head_dim, base.context),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        sliding_window=window,
    )
    experts = ExpertSpec(_softmax_router(config, 128, 8), config.integer("moe_intermediate_size", 768))
    return _moe(config, "qwen3_moe", base, attention, experts)


def _moe(
    config: Fields, name: str, base: hf.Sizes, attention: AttentionSpec, experts: ExpertSpec
) -> ModelSpec:
    layers = _sparse_layers(config, base.layers)
    width = 0 if all(layers) else hf.dense_width(config)
    experts = hf.check_experts(config.source, experts)
    return hf.model(config, name, base, attention, dense_width=width, moe_layers=layers, experts=experts)


def gguf_qwen2(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's qwen2."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, qkv_bias=True)
    return gguf.model(meta, "qwen2", base, attention, dense_width=gguf.dense_width(meta))


def gguf_qwen3(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's qwen3."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, qk_norm="head")
    return gguf.model(meta, "qwen3", base, attention, dense_width=gguf.dense_width(meta))


def gguf_qwen2_moe(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's qwen2moe: weights are not normalised unless the metadata say so."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, qkv_bias=True)
    router = RouterSpec(
        gguf.expert_count(meta), gguf.top_k(meta), normalize=meta.flag("expert_weights_norm", False)
    )
    shared = meta.integer("expert_shared_feed_forward_length", gguf.dense_width(meta))
    experts = ExpertSpec(router, gguf.expert_width(meta), shared_width=shared, shared_gate=True)
    return gguf.moe(meta, "qwen2_moe", base, attention, experts)


def gguf_qwen3_moe(meta: Fields, tensors: Tensors) -> ModelSpec:
    """llama.cpp's qwen3moe: weights are normalised unless the metadata say otherwise."""
    base = gguf.sizes(meta, tensors)
    attention = gguf.grouped_query(meta, base, tensors, qk_norm="head")
    router = RouterSpec(
        gguf.expert_count(meta), gguf.top_k(meta), normalize=meta.flag("expert_weights_norm", True)
    )
    return gguf.moe(meta, "qwen3_moe", base, attention, ExpertSpec(router, gguf.expert_width(meta)))


_GGUF_MOE = {**GGUF, "shared_gate": "blk.{i}.ffn_gate_inp_shexp"}
_HF_MOE = {
    **HF,
    "shared.gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "shared.up": "model.layers.{i}.mlp.shared_expert.up_proj",
    "shared.down": "model.layers.{i}.mlp.shared_expert.down_proj",
    "shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
}
ARCHITECTURES = (
    Architecture(("qwen2",), qwen2, HF, "qwen2", gguf_qwen2, GGUF),
    Architecture(("qwen3",), qwen3, HF, "qwen3", gguf_qwen3, GGUF),
    Architecture(("qwen2_moe",), qwen2_moe, _HF_MOE, "qwen2moe", gguf_qwen2_moe, _GGUF_MOE),
    Architecture(("qwen3_moe",), qwen3_moe, HF, "qwen3moe", gguf_qwen3_moe, GGUF),
)
