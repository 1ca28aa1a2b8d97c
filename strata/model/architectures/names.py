"""Which checkpoint tensors hold which part of a decoder: Hugging Face's names and llama.cpp's (GGUF).

Keys are Strata's parts, values tensor names with {i} for the layer and {e} for the expert. Matrices and norms
get ".weight" (and ".bias") appended, other names are complete. An expert layout is chosen by what is there:

    expert.gate/up/down     one tensor per expert and matrix
    experts.gate/up/down    one tensor [experts, rows, cols] per matrix
    experts.gate_up         gate rows, then up rows of each expert: [experts, 2 * width, hidden]
"""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, str]

HF: Names = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "final_norm": "model.norm",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "out": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "router": "model.layers.{i}.mlp.gate",
    "expert.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "expert.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "expert.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
    "experts.gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "experts.down": "model.layers.{i}.mlp.experts.down_proj",
}

HF_SHARED: Names = {
    "shared.gate": "model.layers.{i}.mlp.shared_experts.gate_proj",
    "shared.up": "model.layers.{i}.mlp.shared_experts.up_proj",
    "shared.down": "model.layers.{i}.mlp.shared_experts.down_proj",
    "select_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
}

HF_MIXTRAL: Names = {
    **HF,
    "router": "model.layers.{i}.block_sparse_moe.gate",
    "select_bias": "model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    "expert.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "expert.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "expert.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}

# transformers 5 saves these with save_original_format=False.
HF_MEMORY: Names = {**HF, "select_bias": "model.layers.{i}.mlp.e_score_correction_bias"}

GGUF: Names = {
    "embed": "token_embd",
    "head": "output",
    "final_norm": "output_norm",
    "attn_norm": "blk.{i}.attn_norm",
    "ffn_norm": "blk.{i}.ffn_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "out": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "router": "blk.{i}.ffn_gate_inp",
    "select_bias": "blk.{i}.exp_probs_b.bias",
    "shared.gate": "blk.{i}.ffn_gate_shexp",
    "shared.up": "blk.{i}.ffn_up_shexp",
    "shared.down": "blk.{i}.ffn_down_shexp",
    "expert.gate": "blk.{i}.ffn_gate.{e}",
    "expert.up": "blk.{i}.ffn_up.{e}",
    "expert.down": "blk.{i}.ffn_down.{e}",
    "experts.gate": "blk.{i}.ffn_gate_exps",
    "experts.up": "blk.{i}.ffn_up_exps",
    "experts.down": "blk.{i}.ffn_down_exps",
}
