"""Writes a random Qwen3-MoE checkpoint with a byte-level tokenizer: small enough to convert in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from strata.interfaces import tokenizer as interfaces_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, WIDTH = 64, 2, 4, 2, 32, 4, 2, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
CONTEXT = 256
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(directory: Path, seed: int = 0) -> Path:
    """A Hugging Face directory; returns it."""
    directory.mkdir(parents=True)
    save_file(_tensors(seed), directory / "model.safetensors")
    _write(directory / "config.json", _config())
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", {"eos_token": SPECIAL[2], "chat_template": TEMPLATE})
    _write(directory / "generation_config.json", {"eos_token_id": [256, 258]})
    return directory


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": WIDTH,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def byte_tokenizer() -> Tokenizer:
    """One token per byte: any text can be written, and halves of characters occur."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def marked_tokenizer(markers: tuple[str, ...]) -> interfaces_tokenizer.Tokenizer:
    """The checkpoint's, to which `markers` are tokens, too."""
    encoder = byte_tokenizer()
    encoder.add_special_tokens([text for text in markers if text not in SPECIAL])
    config = json.dumps({"eos_token": SPECIAL[2]}).encode()
    files = {"tokenizer.json": encoder.to_str().encode(), "tokenizer_config.json": config}
    return interfaces_tokenizer.Tokenizer(files, where="test")


def _tensors(seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (random.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 3,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = np.ones(HEAD_DIM, np.float32)
        tensors[f"{prefix}mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            base = f"{prefix}mlp.experts.{expert}."
            tensors[f"{base}gate_proj.weight"] = matrix(WIDTH, HIDDEN)
            tensors[f"{base}up_proj.weight"] = matrix(WIDTH, HIDDEN)
            tensors[f"{base}down_proj.weight"] = matrix(HIDDEN, WIDTH)
    return tensors
