"""What GGUF metadata of all families share. Keys are the gguf package's `Keys` without "{arch}."."""

from __future__ import annotations

from collections.abc import Mapping

from strata.errors import FileFormatError
from strata.model.architectures import hf
from strata.model.architectures.fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    Fields,
)
from strata.model.architectures.hf import Sizes
from strata.model.architectures.rope import gguf_rope
from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec
from strata.store.source import TensorInfo

Tensors = Mapping[str, TensorInfo] | None


def sizes(meta: Fields, tensors: Tensors) -> Sizes:
    """The common sizes; layers that only predict further tokens (nextn) are not counted."""
    hidden = meta.integer("embedding_length")
    heads = meta.uniform("attention.head_count", high=MAX_HEADS)
    kv = meta.uniform("attention.head_count_kv", heads, high=MAX_HEADS)
    blocks = meta.integer("block_count", high=MAX_LAYERS)
    extra = meta.integer("nextn_predict_layers", 0, low=0, high=blocks - 1)
    if heads % kv:
        raise FileFormatError(f"{meta.source}: {heads} heads cannot share {kv} key-value heads evenly")
    return Sizes(
        layers=blocks - extra,
        hidden=hidden,
        vocab=vocabulary(meta, tensors),
        context=meta.integer("context_length", high=MAX_CONTEXT),
        eps=meta.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        heads=heads,
        kv_heads=kv,
        head_dim=meta.integer("attention.key_length", max(hidden // heads, 1), high=MAX_HEAD_DIM),
        activation="silu",
        tied=tensors is not None and "output.weight" not in tensors,
    )


def vocabulary(meta: Fields, tensors: Tensors) -> int:
    """Rows of the embedding: from the tensor, else from vocab_size or the tokenizer's list."""
    info = (tensors or {}).get("token_embd.weight")
    if info is not None and info.shape:
        return Fields({"rows": info.shape[0]}, f"{meta.source}: token_embd.weight").integer(
            "rows", high=MAX_VOCAB
        )
    tokens = Fields(meta.values, meta.source).items("tokenizer.ggml.tokens")
    return meta.integer("vocab_size", len(tokens) if tokens else None, high=MAX_VOCAB)


def grouped_query(
    meta: Fields,
    base: Sizes,
    tensors: Tensors,
    *,
    rotated: bool = False,
    truncate: bool = True,
    **rest: object,
) -> AttentionSpec:
    """Grouped-query attention with biases if layer 0 has them; `rest` are further AttentionSpec fields."""
    if meta.integer("attention.value_length", base.head_dim, high=MAX_HEAD_DIM) != base.head_dim:
        raise meta.unsupported("a value_length that differs from key_length")
    rotary = meta.integer("rope.dimension_count", base.head_dim, high=base.head_dim)
    if rotated and rotary != base.head_dim:
        raise meta.unsupported(f"rotation of {rotary} of {base.head_dim} dimensions")
    names = tensors or {}
    found = {
        "scale": base.head_dim**-0.5,
        "qkv_bias": "blk.0.attn_q.bias" in names,
        "out_bias": "blk.0.attn_output.bias" in names,
    }
    rope = gguf_rope(meta, rotary, base.context, tensors, truncate=truncate)
    return AttentionSpec(base.heads, base.kv_heads, base.head_dim, rope=rope, **{**found, **rest})


def model(
    meta: Fields, architecture: str, base: Sizes, attention: AttentionSpec, **rest: object
) -> ModelSpec:
    """The ModelSpec of the common sizes and `rest`, further fields of ModelSpec."""
    name = Fields(meta.values, meta.source).text("general.name", architecture)
    return hf.model(Fields({"_name_or_path": name}, meta.source), architecture, base, attention, **rest)


def moe(
    meta: Fields,
    architecture: str,
    base: Sizes,
    attention: AttentionSpec,
    experts: ExpertSpec,
    **rest: object,
) -> ModelSpec:
    """A model whose layers route from leading_dense_block_count on."""
    dense = meta.integer("leading_dense_block_count", 0, low=0, high=base.layers)
    return model(
        meta,
        architecture,
        base,
        attention,
        dense_width=dense_width(meta) if dense else 0,
        moe_layers=(False,) * dense + (True,) * (base.layers - dense),
        experts=hf.check_experts(meta.source, experts),
        **rest,
    )


def dense_width(meta: Fields) -> int:
    """feed_forward_length."""
    return meta.uniform("feed_forward_length")


def expert_width(meta: Fields) -> int:
    """expert_feed_forward_length, which older files leave out where it equals feed_forward_length."""
    default = None if meta.has("expert_feed_forward_length") else dense_width(meta)
    return meta.integer("expert_feed_forward_length", default)


def expert_count(meta: Fields) -> int:
    """expert_count, 0 for dense models."""
    return meta.integer("expert_count", 0, low=0, high=MAX_EXPERTS)


def top_k(meta: Fields) -> int:
    """expert_used_count."""
    return meta.integer("expert_used_count", high=MAX_EXPERTS)


def attention_scale(meta: Fields, base: Sizes) -> float:
    """attention.scale (granite); 0 and absent mean the usual one."""
    return meta.number("attention.scale", 0.0, 0.0, 1e6) or base.head_dim**-0.5


def multipliers(meta: Fields) -> dict[str, float]:
    """Granite's multipliers as ModelSpec fields; logits are divided by logit_scale."""
    return {
        "embedding_scale": meta.number("embedding_scale", 1.0, 1e-9, 1e6),
        "residual_scale": meta.number("residual_scale", 1.0, 1e-9, 1e6),
        "logit_scale": 1.0 / meta.number("logit_scale", 1.0, 1e-9, 1e6),
    }
