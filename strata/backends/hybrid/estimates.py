"""How long the device takes for a layer before its experts, by plan: the split of a prompt needs to know."""

from __future__ import annotations

from strata.backends.base import KvSpec
from strata.core import Batch
from strata.plan.spec import ModelSpec
from strata.plan.speeds import Speeds


def base_seconds(spec: ModelSpec, kv: KvSpec, batch: Batch, speeds: Speeds) -> float:
    """Projections, attention over the batch's contexts, router and shared expert of one layer."""
    experts = spec.experts
    beside = 0
    if experts is not None:
        beside = spec.hidden * (experts.router.experts + 3 * experts.shared_width)
    seen = sum(s.count * (s.start + (s.count + 1) // 2) for s in batch.sequences)
    attention = seen * spec.attention.heads * (kv.key_dim + kv.value_dim)
    return (batch.rows * (_projections(spec) + beside) + attention) / speeds.device_macs


def _projections(spec: ModelSpec) -> int:
    """Weights of a layer's attention."""
    a, mla, hidden = spec.attention, spec.attention.mla, spec.hidden
    if mla is None:
        return hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
    query = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    queries = mla.q_lora_rank * (hidden + query) if mla.q_lora_rank else hidden * query
    keys = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    heads = a.heads * (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.v_head_dim * hidden)
    return queries + keys + heads
