"""Small random transformers models, one row per architecture and variant, for tests of names and logits.

Weights are scaled so that routing, norms, biases and sinks all matter, and rounded to bf16, so that a bf16
store holds them exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 256
CONTEXT = 128
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}

# case name -> (model_type, fields of config.json beyond those of `_common`)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen2_moe-dense-layer": (
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe-top1": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 10,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.2, "pad_token_id": None}),
    "glm4_moe": (
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 4},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 40,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
}


def _common() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def build(case: str, **changes: Any) -> PreTrainedModel:
    """The random model of a case, f32, deterministic. changes: of config.json, over those of the case."""
    model_type, fields = CASES[case]
    torch.manual_seed(sum(case.encode()))
    config = AutoConfig.for_model(model_type, **{**_common(), **fields, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if "inv_freq" not in name:
                tensor.copy_(_random(name, tensor.shape).to(torch.bfloat16).to(torch.float32))
    return model.eval()


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    values = torch.randn(shape)
    if "norm" in name:
        return 1 + 0.3 * values
    if "e_score_correction_bias" in name:
        return 0.2 * values
    if len(shape) == 1 or name.endswith("_bias"):
        return 0.5 * values
    if "embed_tokens" in name:
        return values
    gain = 3.0 if ".router." in name or ".gate.weight" in name else 1.3
    return gain * values / shape[-1] ** 0.5


def save(case: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Build a case and write it as transformers does; returns the model."""
    model = build(case, **changes)
    model.save_pretrained(folder)
    return model
