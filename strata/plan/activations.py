"""What a pass keeps on the device beside weights and KV pages: elements of a row, and of a row of logits.

Scratch of the CUDA kernels is counted, whatever computes: it is what a real card needs. A test makes their
launches for layers of every kind and compares.
"""

from __future__ import annotations

from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec

PIECES_BYTES = 64 * 256
"""Arrays of one layer that are there at once, at most, times the line that each may lose to alignment."""
SPLIT_BLOCKS = 4 * 82
"""Blocks that attention splits the KV length for, at most: four for each of a 3090's SMs."""
MOST_CANDIDATES, CANDIDATE_SPAN = 64, 4096
"""The most logits of a row that are chosen on the device, and of how many each block chooses."""
DRAFT_WORDS = 9
"""Per row at most, where drafts are verified: a token, a number, a place, four settings, two results."""
TICKETS = 4096
"""u32 with which blocks count how many of them are done: one for 16 rows of the hidden dimension, or for a
group of query heads of one row."""
GROUP_HEADS, WIDE_GROUP_HEADS, WIDE = 8, 16, 128
"""Query heads of one KV head that a block of attention takes, and with values of more than 128 elements."""


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
    ffn = 0 if experts is not None and all(spec.moe_layers) else _ffn_scratch(spec.hidden, spec.dense_width)
    if experts is not None:
        # Normed rows, logits, ids and weights, of two routers; experts' sum, shared expert.
        routed = 2 * spec.hidden + 2 * (experts.router.experts + 2 * experts.router.top_k) + 1
        ffn = max(ffn, routed + _expert_scratch(spec.hidden, experts))
    return 3 * spec.hidden + a.rope.rotary_dim + max(attention, ffn)


def scratch_bytes(spec: ModelSpec, kv_heads: int, value_dim: int) -> int:
    """Bytes of scratch that do not grow with the rows: attention's further splits, the experts' tables.

    rows x splits is at most twice SPLIT_BLOCKS / groups: more rows fill the device without splits.
    """
    a, experts = spec.attention, spec.experts
    of_group = GROUP_HEADS if value_dim <= WIDE else WIDE_GROUP_HEADS
    groups = kv_heads * -(-a.heads // kv_heads // of_group)
    splits = 2 * -(-SPLIT_BLOCKS // groups) * _partial_row(a, value_dim)
    tables = 0 if experts is None else 3 * experts.router.experts + 2
    return 4 * (splits + tables + TICKETS)


def logit_row_elements(hidden: int, vocab: int) -> int:
    """f32 of one row whose logits are wanted: the row, normed, its logits, the best of them, its draft's."""
    candidates = 2 * MOST_CANDIDATES * (1 + -(-vocab // CANDIDATE_SPAN))
    return 2 * hidden + vocab + 1 + candidates + DRAFT_WORDS


def _partial_row(a: AttentionSpec, value_dim: int) -> int:
    """One split's result of all heads: a sum, its largest score and its weight."""
    return a.heads * (value_dim + 2)


def _ffn_scratch(hidden: int, width: int) -> int:
    """Gate and up beside the packed row, or beside their product and that, packed."""
    width = -(-width // 8) * 8
    return 0 if width == 0 else max(2 * width + _packed(hidden), 3 * width + _packed(width))


def _packed(columns: int) -> int:
    """A row for the tensor cores: bf16, and 4 totals per 64 columns."""
    padded = -(-columns // 128) * 128
    return padded // 2 + padded // 16


def _expert_scratch(hidden: int, experts: ExpertSpec) -> int:
    """Of each chosen expert: its product and its output, and three words in tables; or the shared expert.

    A prompt's row is packed, and so are the products.
    """
    each, prompt = hidden + experts.width + 3, hidden + _packed(experts.width) + 3
    top_k = experts.router.top_k
    return max(
        top_k * each + 1, _packed(hidden) + top_k * prompt + 1, _ffn_scratch(hidden, experts.shared_width)
    )
