"""GGUF files of small transformers models, written with the gguf package.

Which tensor gets which name is the gguf package's TensorNameMap; metadata and the changes to tensors (q and k
permuted for llama, experts split and stacked, kv_b cut) are those of llama.cpp's convert_hf_to_gguf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
}
PERMUTED = ("llama", "mistral", "mixtral", "granite", "granitemoe")


def write(
    model: Any,
    path: Path,
    *,
    split_kv_b: bool = True,
    mtp: bool = False,
    further: Mapping[str, NDArray[np.float32]] | None = None,
) -> None:
    """Write a transformers model. split_kv_b: as converters since 2025 do; mtp: with one nextn layer, all but
    empty. further: the model's last layer is one, and these are its parts by their name in GGUF.
    """
    config = model.config
    arch = ARCHS[config.model_type]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _metadata(writer, config, split_kv_b, mtp)
    name_map = gguf.get_tensor_name_map(arch, config.num_hidden_layers + mtp)
    for name, tensor in _tensors(model, split_kv_b):
        mapped = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        mapped += ".weight" if mapped.endswith("sinks") else ""
        writer.add_tensor(mapped, np.ascontiguousarray(tensor.squeeze().numpy()))
    for part, values in (further or {}).items():
        writer.add_tensor(f"blk.{config.num_hidden_layers - 1}.nextn.{part}.weight", values)
    if further:
        writer.add_nextn_predict_layers(1)
    for name, values in _extra(config, mtp):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(weights: Tensor, heads: int) -> Tensor:
    """Rows of a head from halves (i, i + d/2) to pairs (2i, 2i + 1)."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _tensors(model: Any, split_kv_b: bool) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for original, tensor in model.state_dict().items():
        if original == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = original.replace("block_sparse_moe.experts", "mlp.experts")
        name = name.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("mlp.e_score", "block_sparse_moe.e_score")
        if ".experts." in name:
            yield from _experts(name, tensor, config.model_type == "gpt_oss")
        elif "kv_b_proj" in name and split_kv_b:
            yield from _latent(name, tensor, config)
        elif config.model_type in PERMUTED and "q_proj" in name:
            yield name, permute(tensor, config.num_attention_heads)
        elif config.model_type in PERMUTED and "k_proj" in name:
            yield name, permute(tensor, config.num_key_value_heads)
        else:
            yield name, tensor


def _experts(name: str, tensor: Tensor, interleaved: bool) -> Iterator[tuple[str, Tensor]]:
    bias = name.endswith("_bias")
    stem, suffix = (name.removesuffix("_bias"), ".bias") if bias else (name, ".weight")
    if interleaved and not bias:
        tensor = tensor.transpose(1, 2)
    if "gate_up_proj" not in stem:
        yield stem + suffix, tensor
        return
    halves = (tensor[:, 0::2], tensor[:, 1::2]) if interleaved else tensor.chunk(2, dim=1)
    for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield stem.replace("gate_up_proj", part) + suffix, half


def _latent(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
    k, v = torch.split(heads, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), v


def _extra(config: Any, mtp: bool) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config.rope_parameters, config.head_dim)
    if mtp:
        yield f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32)


def llama3_divisors(rope: dict[str, Any], dim: int) -> NDArray[np.float32]:
    """What frequencies are divided by, pair by pair."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _metadata(writer: GGUFWriter, config: Any, split_kv_b: bool, mtp: bool) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers + mtp)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if mtp:
        writer.add_nextn_predict_layers(1)
    if getattr(config, "sliding_window", None) and config.model_type in ("gpt_oss", "mistral", "mixtral"):
        writer.add_sliding_window(config.sliding_window)
    _rope(writer, config)
    _experts_metadata(writer, config)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if hasattr(config, "kv_lora_rank"):
        _latent_metadata(writer, config, split_kv_b)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _experts_metadata(writer: GGUFWriter, config: Any) -> None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((getattr(config, n) for n in names if getattr(config, n, None)), 0)
    if not experts:
        return
    kind = config.model_type
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    elif kind in ("gpt_oss", "minimax_m2"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind in ("glm4_moe", "deepseek_v3", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)


def _latent_metadata(writer: GGUFWriter, config: Any, split_kv_b: bool) -> None:
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if split_kv_b:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim)
