"""What is not supported is refused by name, and no value of a config is believed before it is checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import FileFormatError, IncompleteError, StrataError, UnsupportedError
from strata.model.resolve import resolve
from strata.store.source import TensorInfo

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
V2 = {
    **LLAMA,
    "model_type": "deepseek_v2",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
V3 = {**V2, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 16}
MINIMAX = {**LLAMA, "model_type": "minimax_m2", "num_local_experts": 8}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 32,
}


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": values}


def quantized(**values: Any) -> dict[str, Any]:
    return {"quantization_config": values}


UNSUPPORTED = [
    (LLAMA, rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "longrope"),
    (LLAMA, rope(type="dynamic", factor=2.0), "dynamic"),
    (LLAMA, rope(rope_type="default", mrope_section=[8, 4, 4]), "mrope_section"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
    (LLAMA, {"head_dim": 15}, "RoPE over 15 dimensions"),
    (LLAMA, {"hidden_act": "relu2"}, "relu2"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    # case-29: states that cannot be rewound would keep rejected drafts.
    ({**LLAMA, "model_type": "qwen3"}, {"layer_types": ["linear_attention"]}, "linear_attention"),
    ({**LLAMA, "model_type": "qwen3_next"}, {}, "qwen3_next"),
    ({**LLAMA, "model_type": "minicpm"}, {"scale_emb": 12}, "minicpm"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
    (V2, {"topk_method": "noaux_tc"}, "noaux_tc"),
    (V2, {"attention_bias": True}, "attention_bias"),
    (V2, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (V3, {"scoring_func": "softmax"}, "softmax"),
    (V3, {"architectures": ["KimiLinearForCausalLM"]}, "KimiLinearForCausalLM"),
    ({**V3, "model_type": "kimi_k2"}, {"architectures": ["KimiK2VL"]}, "KimiK2VL"),
    (MINIMAX, {"attn_type_list": [0]}, "lightning"),
    (MINIMAX, {"shared_intermediate_size": 512}, "shared_intermediate_size"),
    (LLAMA, quantized(quant_method="awq", bits=4), "awq"),
    (LLAMA, quantized(quant_method="gptq", bits=4), "gptq"),
    (LLAMA, quantized(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    (LLAMA, quantized(quant_method="mxfp4"), "mxfp4"),
    (LLAMA, quantized(quant_method="fp8"), "fp8 without weight_block_size"),
    (LLAMA, quantized(quant_method="fp8", weight_block_size=[128, 128], fmt="e5m2"), "e5m2"),
    (
        LLAMA,
        quantized(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="static"),
        "fixed activation scales",
    ),
    (GPT_OSS, quantized(quant_method="fp8", weight_block_size=[128, 128]), "fp8"),
]


@pytest.mark.parametrize(("base", "change", "named"), UNSUPPORTED, ids=[row[2] for row in UNSUPPORTED])
def test_refused_by_name(base: dict[str, Any], change: dict[str, Any], named: str) -> None:
    resolve(base, None, "safetensors") if base["model_type"] in ("llama", "qwen3_moe") else None
    with pytest.raises(UnsupportedError) as refusal:
        resolve({**base, **change}, None, "safetensors")
    assert named in refusal.value.cause
    assert base["model_type"] in refusal.value.cause


IMPOSSIBLE = [
    (
        LLAMA,
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000, expected an integer from 1 to 1024",
    ),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size is '64'"),
    (LLAMA, {"hidden_size": 64.5}, "hidden_size is 64.5"),
    (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
    (LLAMA, {"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    (LLAMA, {"num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
    (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    (LLAMA, {"rope_theta": 0}, "rope_theta is 0"),
    (LLAMA, {"rope_theta": 1.0}, "rope_theta is 1.0"),
    (LLAMA, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    (LLAMA, rope(rope_type="linear"), "factor"),
    (LLAMA, rope(rope_type="linear", factor=0), "factor is 0"),
    (LLAMA, rope(rope_type="llama3", factor=8.0, low_freq_factor=4, high_freq_factor=1), "must exceed"),
    (MOE, {"num_experts_per_tok": 9}, "9 experts per token of 8"),
    (MOE, {"num_experts": 10**7}, "num_experts is 10000000"),
    (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (MOE, {"num_hidden_layers": 1024, "num_experts": 4096}, "more than 262144 experts"),
    (V3, {"n_group": 3}, "8 experts cannot be chosen from 2 of 3 groups"),
    (V3, {"topk_group": 5}, "5 of 4 groups"),
    (V3, {"num_experts_per_tok": 5}, "5 experts per token of 4"),
    (V3, {"n_group": 8}, "8 experts cannot be chosen from 2 of 8 groups"),
    (GPT_OSS, {"layer_types": ["full_attention"] * 2}, "2 entries for 1 layers"),
    ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["sliding_attention"]}, "sliding_window is not set"),
]


@pytest.mark.parametrize(("base", "change", "said"), IMPOSSIBLE, ids=[row[2] for row in IMPOSSIBLE])
def test_impossible_values_name_field_and_value(
    base: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(FileFormatError) as error:
        resolve({**base, **change}, None, "safetensors")
    assert said in error.value.cause


GGUF_BAD = [
    ({"general.architecture": "qwen3next"}, UnsupportedError, "qwen3next"),
    ({"general.architecture": 7}, FileFormatError, "general.architecture is 7"),
    ({"llama.block_count": 2**32 - 1}, FileFormatError, "llama.block_count is 4294967295"),
    ({"llama.attention.head_count": [4, 8]}, UnsupportedError, "head_count that differs between layers"),
    ({"llama.feed_forward_length": []}, UnsupportedError, "feed_forward_length"),
    ({"llama.attention.value_length": 32}, UnsupportedError, "value_length"),
    ({"llama.rope.dimension_count": 8}, UnsupportedError, "rotation of 8 of 16"),
    ({"llama.rope.scaling.type": "longrope"}, UnsupportedError, "longrope"),
    ({"llama.attention.layer_norm_rms_epsilon": math.inf}, FileFormatError, "inf"),
    ({"llama.nextn_predict_layers": 1}, FileFormatError, "nextn_predict_layers is 1"),
    ({"llama.expert_count": 4, "llama.expert_used_count": 5}, FileFormatError, "5 experts per token of 4"),
]


@pytest.mark.parametrize(("change", "kind", "said"), GGUF_BAD, ids=[row[2] for row in GGUF_BAD])
def test_gguf_metadata_are_checked(change: dict[str, Any], kind: type[StrataError], said: str) -> None:
    assert resolve(GGUF, None, "gguf").spec.layers == 1
    with pytest.raises(kind) as error:
        resolve({**GGUF, **change}, None, "gguf")
    assert said in error.value.cause


def llama_tensors(**changed: tuple[int, ...] | None) -> dict[str, TensorInfo]:
    """The tensors of LLAMA; a changed shape of None leaves the tensor out, new names are added."""
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...] | None] = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        layer + "input_layernorm.weight": (64,),
        layer + "post_attention_layernorm.weight": (64,),
        layer + "self_attn.q_proj.weight": (64, 64),
        layer + "self_attn.k_proj.weight": (32, 64),
        layer + "self_attn.v_proj.weight": (32, 64),
        layer + "self_attn.o_proj.weight": (64, 64),
        layer + "mlp.gate_proj.weight": (96, 64),
        layer + "mlp.up_proj.weight": (96, 64),
        layer + "mlp.down_proj.weight": (64, 96),
        **changed,
    }
    return {
        name: TensorInfo(name, "F32", shape, 4 * math.prod(shape), Path("m.safetensors"), 0)
        for name, shape in shapes.items()
        if shape is not None
    }


TENSORS_BAD = [
    ({"model.norm.weight": None}, IncompleteError, "model.norm.weight is missing"),
    ({"model.norm.weight": (65,)}, FileFormatError, "shape [65], the model needs [64]"),
    ({"model.layers.0.self_attn.q_proj.bias": (64,)}, UnsupportedError, "q_proj.bias is no part of llama"),
    ({"visual.patch_embed.weight": (8, 8)}, UnsupportedError, "visual.patch_embed.weight"),
    ({"model.layers.0.mlp.gate_proj.qweight": (8, 8)}, UnsupportedError, "GPTQ or AWQ"),
    ({"model.layers.0.mlp.gate_proj.weight_scale_2": (1,)}, UnsupportedError, "NVFP4"),
    ({"model.layers.0.mlp.gate_proj.weight.absmax": (8,)}, UnsupportedError, "bitsandbytes"),
]


@pytest.mark.parametrize(("change", "kind", "said"), TENSORS_BAD, ids=[row[2] for row in TENSORS_BAD])
def test_tensors_must_be_those_of_the_model(
    change: dict[str, tuple[int, ...] | None], kind: type[StrataError], said: str
) -> None:
    with pytest.raises(kind) as error:
        resolve(LLAMA, llama_tensors(**change), "safetensors")
    assert said in error.value.cause


def test_weights_without_config_are_incomplete() -> None:
    with pytest.raises(IncompleteError, match=r"no config\.json"):
        resolve({}, llama_tensors(), "safetensors")


def test_tensors_without_weights_and_mtp_layers_are_passed_over() -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
        "model.layers.1.eh_proj.weight": (64, 128),
        "lm_head.weight": (32, 64),
    }
    plain = resolve(LLAMA, llama_tensors(), "safetensors")
    found = resolve(LLAMA, llama_tensors(**extra), "safetensors")
    assert (found.spec, found.targets, found.experts) == (plain.spec, plain.targets, plain.experts)
    assert not plain.notes and "layer 1 predicts further tokens" in found.notes[0]
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.eh_proj"):
        resolve(LLAMA, llama_tensors(**{"model.layers.0.eh_proj.weight": (64, 128)}), "safetensors")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), base=st.sampled_from([LLAMA, MOE, V2, V3, GPT_OSS, MINIMAX]))
def test_any_config_resolves_or_is_refused(data: st.DataObject, base: dict[str, Any]) -> None:
    keys = sorted({*base, "rope_scaling", "rope_parameters", "quantization_config", "layer_types"})
    changed = data.draw(st.dictionaries(st.sampled_from(keys), ANYTHING, max_size=4))
    try:
        resolve({**base, **changed}, None, "safetensors")
    except StrataError as error:
        assert len(error.cause) < 500


@settings(max_examples=100, deadline=None)
@given(
    changed=st.dictionaries(st.sampled_from([*sorted(GGUF), "llama.rope.scaling.type"]), ANYTHING, max_size=3)
)
def test_any_gguf_metadata_resolve_or_are_refused(changed: dict[str, Any]) -> None:
    try:
        resolve({**GGUF, **changed}, None, "gguf")
    except StrataError as error:
        assert len(error.cause) < 500
