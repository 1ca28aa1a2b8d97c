"""What a pass keeps on the device beside weights and KV pages: elements of a row, and of a row of logits."""

from __future__ import annotations

from strata.plan.spec import ModelSpec

PIECES_BYTES = 64 * 256
"""Arrays of one layer that are there at once, at most, times the line that each may lose to alignment."""


def row_elements(spec: ModelSpec, key_dim: int, value_dim: int) -> int:
    """f32 of one token: embedding, rope tables, the widest layer. key_dim, value_dim: of a cached head."""
    a, experts = spec.attention, spec.experts
    if a.mla is None:
        qkv = (a.heads + 2 * a.kv_heads) * a.head_dim
        attention = 2 * qkv + a.heads * a.head_dim
    else:
        query = a.heads * (a.mla.qk_nope_head_dim + a.mla.qk_rope_head_dim)
        value = a.heads * (value_dim + a.mla.v_head_dim)
        attention = 2 * a.mla.q_lora_rank + 2 * query + value + a.heads * (key_dim + value_dim)
        attention += 5 * key_dim
    routed = 0
    if experts is not None:
        # Normed rows, logits, ids and weights, of two routers; experts' sum, shared expert.
        routed = 2 * spec.hidden + 2 * (experts.router.experts + 2 * experts.router.top_k) + 1
    return 3 * spec.hidden + a.rope.rotary_dim + max(attention, routed)


def logit_row_elements(hidden: int, vocab: int) -> int:
    """f32 of one row whose logits are wanted: the row, normed, and its logits."""
    return 2 * hidden + vocab + 1
