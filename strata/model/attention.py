"""The attention of a decoder layer out of a store: grouped-query, or DeepSeek's multi-head latent one."""

from __future__ import annotations

from strata.backends.parts import Attention, AttentionCall, GroupedQueryAttention, LatentAttention
from strata.model.loading import Weights
from strata.plan.spec import MlaSpec, ModelSpec


def load_attention(spec: ModelSpec, weights: Weights, layer: int) -> Attention:
    """The attention of decoder layer `layer`."""
    if spec.attention.mla is None:
        return _load_grouped_query(spec, weights, layer)
    return _load_latent(spec, spec.attention.mla, weights, layer)


def _load_grouped_query(spec: ModelSpec, weights: Weights, layer: int) -> GroupedQueryAttention:
    a, hidden = spec.attention, spec.hidden
    qkv_rows = (a.heads + 2 * a.kv_heads) * a.head_dim
    per_head, normed = a.qk_norm == "head", a.qk_norm != "none"
    return GroupedQueryAttention(
        norm=weights.norm("attn_norm.weight", hidden, spec.norm_eps),
        spec=a,
        call=_call(spec, weights, layer),
        qkv=weights.matrix("attn.qkv.weight", qkv_rows, hidden),
        qkv_bias=weights.vector_if(a.qkv_bias, "attn.qkv.bias", qkv_rows),
        q_norm=weights.vector_if(normed, "attn.q_norm.weight", a.head_dim * (1 if per_head else a.heads)),
        k_norm=weights.vector_if(normed, "attn.k_norm.weight", a.head_dim * (1 if per_head else a.kv_heads)),
        out=weights.matrix("attn.out.weight", hidden, a.heads * a.head_dim),
        out_bias=weights.vector_if(a.out_bias, "attn.out.bias", hidden),
        scale=spec.residual_scale,
    )


def _load_latent(spec: ModelSpec, mla: MlaSpec, weights: Weights, layer: int) -> LatentAttention:
    a, hidden, low_rank = spec.attention, spec.hidden, mla.q_lora_rank > 0
    q_rows = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return LatentAttention(
        norm=weights.norm("attn_norm.weight", hidden, spec.norm_eps),
        spec=a,
        mla=mla,
        call=_call(spec, weights, layer),
        q=None if low_rank else weights.matrix("attn.q.weight", q_rows, hidden),
        q_a=weights.matrix("attn.q_a.weight", mla.q_lora_rank, hidden) if low_rank else None,
        q_a_norm=weights.vector_if(low_rank, "attn.q_a_norm.weight", mla.q_lora_rank),
        q_b=weights.matrix("attn.q_b.weight", q_rows, mla.q_lora_rank) if low_rank else None,
        kv_a=weights.matrix("attn.kv_a.weight", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        kv_a_norm=weights.vector("attn.kv_a_norm.weight", mla.kv_lora_rank),
        k_b=weights.matrix("attn.k_b.weight", a.heads * mla.kv_lora_rank, mla.qk_nope_head_dim),
        v_b=weights.matrix("attn.v_b.weight", a.heads * mla.v_head_dim, mla.kv_lora_rank),
        out=weights.matrix("attn.out.weight", hidden, a.heads * mla.v_head_dim),
        out_bias=weights.vector_if(a.out_bias, "attn.out.bias", hidden),
        scale=spec.residual_scale,
    )


def _call(spec: ModelSpec, weights: Weights, layer: int) -> AttentionCall:
    attention = spec.attention
    sinks = weights.vector_if(attention.sinks, "attn.sinks", attention.heads)
    return AttentionCall(layer, attention.heads, attention.scale, spec.window(layer), sinks)
