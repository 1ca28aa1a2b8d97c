"""Writes a small glm4_moe checkpoint whose last layer predicts further tokens, and is always right.

The next token is the current one plus one (bytes go round, special ones stay): attention and FFN add nothing,
and the further layer knows the token that it reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tiny_checkpoint import CONTEXT, EXPERTS, SPECIAL, TEMPLATE, VOCAB, byte_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOP_K, WIDTH = 64, 2, 4, 2, 16, 2, 64


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """A Hugging Face directory; returns it. changes: of config.json; vocab_size and hidden_size count."""
    directory.mkdir(parents=True)
    config = {**_CONFIG, **changes}
    save_file(_tensors(config), directory / "model.safetensors")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    files = {
        "config": config,
        "tokenizer_config": {"eos_token": SPECIAL[2], "chat_template": TEMPLATE},
        "generation_config": {"eos_token_id": [256, 258]},
    }
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


_CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}


def _tensors(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    random, hidden, vocab = np.random.default_rng(0), config["hidden_size"], config["vocab_size"]
    embedding = random.standard_normal((vocab, hidden)).astype(np.float32)
    before = np.arange(vocab)
    before[:256] = (before[:256] - 1) % 256
    ones, layers = np.ones(hidden, np.float32), config["num_hidden_layers"]
    last = f"model.layers.{layers}."
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": embedding[before],
        f"{last}eh_proj.weight": np.eye(hidden, 2 * hidden, dtype=np.float32),
        **{f"{last}{norm}.weight": ones for norm in ("enorm", "hnorm", "shared_head.norm")},
    }
    for layer in range(layers + 1):
        tensors |= _layer(random, hidden, f"model.layers.{layer}.", routed=layer > 0)
    return tensors


def _layer(random: Any, hidden: int, prefix: str, *, routed: bool) -> dict[str, NDArray[np.float32]]:
    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = (random.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)
        return values

    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{prefix}{norm}.weight": np.ones(hidden, np.float32) for norm in norms}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, hidden)
    tensors[f"{prefix}self_attn.o_proj.weight"] = np.zeros((hidden, HEADS * HEAD_DIM), np.float32)
    ffns = ["mlp."]
    if routed:
        tensors[f"{prefix}mlp.gate.weight"] = matrix(EXPERTS, hidden)
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = np.zeros(EXPERTS, np.float32)
        ffns = ["mlp.shared_experts.", *(f"mlp.experts.{expert}." for expert in range(EXPERTS))]
    for ffn in ffns:
        tensors |= {f"{prefix}{ffn}{part}_proj.weight": matrix(WIDTH, hidden) for part in ("gate", "up")}
        tensors[f"{prefix}{ffn}down_proj.weight"] = np.zeros((hidden, WIDTH), np.float32)
    return tensors
