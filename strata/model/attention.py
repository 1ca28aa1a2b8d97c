"""The two kinds of attention: grouped-query, and DeepSeek's multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from strata.backends.base import Array, AttentionCall, Backend, Weight
from strata.core import Batch
from strata.model.loading import Weights
from strata.plan.spec import AttentionSpec, MlaSpec, ModelSpec


class Attention(Protocol):
    """Attention of one layer."""

    def forward(self, hidden: Array, cache: Any, batch: Batch) -> Array:
        """Normalized hidden states `[rows, hidden]` -> the attention branch, same shape."""
        ...


def load_attention(spec: ModelSpec, weights: Weights, layer: int) -> Attention:
    """The attention of decoder layer `layer`."""
    if spec.attention.mla is None:
        return _load_grouped_query(spec, weights, layer)
    return _load_latent(spec, spec.attention.mla, weights, layer)


@dataclass(frozen=True)
class GroupedQueryAttention:
    """GQA with optional biases, q/k norms, clipping, sliding window and sinks."""

    ops: Backend
    spec: AttentionSpec
    eps: float
    call: AttentionCall
    qkv: Weight
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    out: Weight
    out_bias: Array | None

    def forward(self, hidden: Array, cache: Any, batch: Batch) -> Array:
        """See Attention."""
        ops, spec, heads, kv_heads = self.ops, self.spec, self.spec.heads, self.spec.kv_heads
        qkv = ops.linear(hidden, self.qkv, self.qkv_bias)
        q, k, v = ops.split(qkv, [n * spec.head_dim for n in (heads, kv_heads, kv_heads)])
        q = ops.prepare_heads(q, heads, batch.positions, spec, self.q_norm, self.eps)
        k = ops.prepare_heads(k, kv_heads, batch.positions, spec, self.k_norm, self.eps)
        if spec.clip_qkv is not None:
            v = ops.prepare_heads(v, kv_heads, batch.positions, _without_rotation(spec), None, self.eps)
        mixed = ops.attention(q, k, v, cache, batch, self.call)
        return ops.linear(mixed, self.out, self.out_bias)


@dataclass(frozen=True)
class LatentAttention:
    """MLA in its absorbed form: the cache holds one latent and one rotated key per token, for all heads.

    k_b carries each query head into the latent's space, so that q.k is taken there; what is mixed are
    latents, and v_b expands the mixture per head. Mathematically the same as expanding every key and value.
    """

    ops: Backend
    spec: AttentionSpec
    mla: MlaSpec
    eps: float
    call: AttentionCall
    q: Weight | None
    q_a: Weight | None
    q_a_norm: Array | None
    q_b: Weight | None
    kv_a: Weight
    kv_a_norm: Array
    k_b: Weight
    v_b: Weight
    out: Weight
    out_bias: Array | None

    def forward(self, hidden: Array, cache: Any, batch: Batch) -> Array:
        """See Attention."""
        mixed = self.ops.attention(
            self._query(hidden, batch), self._key(hidden, batch), None, cache, batch, self.call
        )
        values = self.ops.head_linear(mixed, self.v_b, self.spec.heads)
        return self.ops.linear(values, self.out, self.out_bias)

    def _query(self, hidden: Array, batch: Batch) -> Array:
        """`[rows, heads * (kv_lora_rank + qk_rope_head_dim)]`."""
        ops, mla, heads = self.ops, self.mla, self.spec.heads
        if self.q is not None:
            q = ops.linear(hidden, self.q)
        else:
            low = ops.linear(hidden, self.q_a)
            q = ops.linear(ops.rms_norm(low, self.q_a_norm, mla.norm_eps), self.q_b)
        plain, rotated = ops.split_heads(q, heads, [mla.qk_nope_head_dim, mla.qk_rope_head_dim])
        rotated = ops.prepare_heads(rotated, heads, batch.positions, self.spec, None, self.eps)
        return ops.join_heads([ops.head_linear(plain, self.k_b, heads), rotated], heads)

    def _key(self, hidden: Array, batch: Batch) -> Array:
        """`[rows, kv_lora_rank + qk_rope_head_dim]`; its first kv_lora_rank elements are the value, too."""
        ops, mla = self.ops, self.mla
        latent, rotated = ops.split(ops.linear(hidden, self.kv_a), [mla.kv_lora_rank, mla.qk_rope_head_dim])
        latent = ops.rms_norm(latent, self.kv_a_norm, mla.norm_eps)
        rotated = ops.prepare_heads(rotated, 1, batch.positions, self.spec, None, self.eps)
        return ops.join_heads([latent, rotated], 1)


def _without_rotation(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, rope=replace(spec.rope, rotary_dim=0))


def _call(spec: ModelSpec, weights: Weights, layer: int) -> AttentionCall:
    attention = spec.attention
    sinks = weights.vector_if(attention.sinks, "attn.sinks", attention.heads)
    return AttentionCall(layer, attention.heads, attention.scale, spec.window(layer), sinks)


def _load_grouped_query(spec: ModelSpec, weights: Weights, layer: int) -> GroupedQueryAttention:
    a, hidden = spec.attention, spec.hidden
    qkv_rows = (a.heads + 2 * a.kv_heads) * a.head_dim
    per_head, normed = a.qk_norm == "head", a.qk_norm != "none"
    return GroupedQueryAttention(
        ops=weights.backend,
        spec=a,
        eps=spec.norm_eps,
        call=_call(spec, weights, layer),
        qkv=weights.matrix("attn.qkv.weight", qkv_rows, hidden),
        qkv_bias=weights.vector_if(a.qkv_bias, "attn.qkv.bias", qkv_rows),
        q_norm=weights.vector_if(normed, "attn.q_norm.weight", a.head_dim * (1 if per_head else a.heads)),
        k_norm=weights.vector_if(normed, "attn.k_norm.weight", a.head_dim * (1 if per_head else a.kv_heads)),
        out=weights.matrix("attn.out.weight", hidden, a.heads * a.head_dim),
        out_bias=weights.vector_if(a.out_bias, "attn.out.bias", hidden),
    )


def _load_latent(spec: ModelSpec, mla: MlaSpec, weights: Weights, layer: int) -> LatentAttention:
    a, hidden, low_rank = spec.attention, spec.hidden, mla.q_lora_rank > 0
    q_rows = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return LatentAttention(
        ops=weights.backend,
        spec=a,
        mla=mla,
        eps=spec.norm_eps,
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
    )
