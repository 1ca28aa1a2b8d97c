"""Strata's own tensor names: what the converter writes and the decoder asks for.

Matrices are packed (`formats.py`) unless marked *plain* (stored as BF16/F32 safetensors tensors).

    embed.weight [vocab, hidden]      head.weight [vocab, hidden] (absent when tied)
    final_norm.weight [hidden] plain

per layer, prefixed `layers.N.`:
    attn_norm.weight, ffn_norm.weight [hidden] plain
    attn.qkv.weight [(heads + 2 kv_heads) * head_dim, hidden]: q rows, k rows, v rows; attn.qkv.bias plain
    attn.q_norm.weight, attn.k_norm.weight plain; attn.sinks [heads] plain
    attn.out.weight [hidden, heads * head_dim (v_head_dim for MLA)]; attn.out.bias plain
    MLA: attn.q.weight, or attn.q_a.weight + attn.q_a_norm.weight (plain) + attn.q_b.weight;
         attn.kv_a.weight [kv_lora_rank + qk_rope_head_dim, hidden], attn.kv_a_norm.weight plain,
         attn.k_b.weight [heads * kv_lora_rank, qk_nope_head_dim]: per head the transposed key part of kv_b,
         attn.v_b.weight [heads * v_head_dim, kv_lora_rank]: per head the value part of kv_b (absorbed form)
    dense layers: mlp.gate_up.weight (gate and up rows interleaved in blocks of 8 as in ExpertLayout,
         width padded to a multiple of 8), mlp.down.weight [hidden, width]
    router.weight [experts, hidden] plain; router.bias, router.select_bias [experts] plain
    shared_expert.gate_up.weight, shared_expert.down.weight; shared_expert.gate.weight [1, hidden] plain

a layer that predicts further tokens (MTP head) is a store of its own: that layer as layer 0, an embedding, a
head, and what makes the layer's input of the next token's embedding e and the hidden state h,
join.embed * embed_norm(e) + join.hidden * hidden_norm(h):
    embed_norm.weight, hidden_norm.weight [hidden] plain
    join.embed.weight, join.hidden.weight [hidden, hidden]

Routed experts live in `experts/expert-EEE.safetensors`, one U8 record `layers.N` per MoE layer.
"""

from __future__ import annotations

from strata.core import ExpertId

EMBED = "embed.weight"
HEAD = "head.weight"
FINAL_NORM = "final_norm.weight"
EMBED_NORM = "embed_norm.weight"
HIDDEN_NORM = "hidden_norm.weight"
JOIN_EMBED = "join.embed.weight"
JOIN_HIDDEN = "join.hidden.weight"


def layer(index: int, part: str) -> str:
    """Name of a part of decoder layer `index`, e.g. layer(3, "attn.qkv.weight")."""
    return f"layers.{index}.{part}"


def expert_file(index: int) -> str:
    """Path of an expert's shard relative to the store."""
    return f"experts/expert-{index:03d}.safetensors"


def expert_record(expert: ExpertId) -> str:
    """Name of an expert's record inside its shard."""
    return f"layers.{expert.layer}"


def place(name: str) -> tuple[int | None, str]:
    """Inverse of `layer`, without ".weight": (3, "attn.qkv"); (None, "") for what is in no layer."""
    parts = name.split(".", 2)
    return (int(parts[1]), parts[2].removesuffix(".weight")) if parts[0] == "layers" else (None, "")
