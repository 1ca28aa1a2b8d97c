"""Every real config.json is counted as transformers counts it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.errors import FileFormatError, StrataError, UnsupportedError
from strata.model.counts import count
from strata.model.resolve import resolve

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "cases" / "configs"
FOLDERS = ("real", "quantised", "reconstructed", "transcribed")
FILES = sorted(f"{d}/{f.name}" for d in FOLDERS if (CONFIGS / d).is_dir() for f in (CONFIGS / d).iterdir())

SUPPORTED = {
    "real/EchoCog--gpt-oss-20b_config.json",
    "real/MiniMaxAI--MiniMax-M2.5_config.json",
    "real/MiniMaxAI--MiniMax-M2.7_config.json",
    "real/Qwen--Qwen3-0.6B_config.json",
    "real/Qwen--Qwen3-1.7B_config.json",
    "real/Qwen--Qwen3-235B-A22B_config.json",
    "real/Qwen--Qwen3-30B-A3B_config.json",
    "real/Qwen--Qwen3-32B_config.json",
    "real/Qwen--Qwen3-8B_config.json",
    "real/Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json",
    "real/deepseek-ai--DeepSeek-R1_config.json",
    "real/deepseek-ai--DeepSeek-V3_config.json",
    "real/meta-llama--Meta-Llama-3.1-405B_config.json",
    "real/meta-llama--Meta-Llama-3.1-70B_config.json",
    "real/meta-llama--Meta-Llama-3.1-8B_config.json",
    "real/mistralai--Mixtral-8x22B-v0.1_config.json",
    "real/mistralai--Mixtral-8x7B-v0.1_config.json",
    "real/moe-lrc--deepseek2.config.json",
    "real/moe-lrc--mixtral.config.json",
    "real/moe-lrc--olmoe.config.json",
    "real/moe-lrc--powermoe.config.json",
    "real/moe-lrc--qwen.config.json",
    "real/moe-lrc--qwen3.config.json",
    "real/openai--gpt-oss-120b_config.json",
    "real/openai--gpt-oss-20b_config.json",
    "reconstructed/MiniMax--minimax_m2-default_config.json",
    "reconstructed/ibm--granitemoe-default_config.json",
    "reconstructed/olmoe-default_config.json",
    "reconstructed/zai-org--GLM-4.6_config.json",
    "transcribed/zai-org--GLM-4.5-Air_config.json",
}
# Configs that expected.json has no counts for, and the file with the same shapes that it has some for.
SAME_SHAPES = {
    "quantised/Qwen--Qwen3-30B-A3B-FP8_config.json": "real/Qwen--Qwen3-30B-A3B_config.json",
    "quantised/Qwen--Qwen3-32B-FP8_config.json": "real/Qwen--Qwen3-32B_config.json",
    # ModelOpt names its method in another file: the tensors give it away (test_arch_refusals).
    "quantised/nvidia--Qwen3-235B-A22B-NVFP4_config.json": "real/Qwen--Qwen3-235B-A22B_config.json",
}
# transformers has no class for this model_type; the total is that of its DeepseekV3 class.
KIMI_K2 = "real/moonshotai--Kimi-K2-Instruct_config.json"
# Of a supported family, but with values that no model can have: what is said about them.
REFUSED_VALUES = {
    "reconstructed/deepseek-ai--deepseek_v2-default_config.json": "num_experts_per_tok is missing",
    "reconstructed/zai-org--glm4_moe-default_config.json": "RoPE over 21 dimensions",
    "quantised/nvidia--MiniMax-M2.5-NVFP4_config.json": "NVFP4",
}


def load(name: str) -> dict[str, Any]:
    data = json.loads((CONFIGS / name).read_text())
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def expected(cases: Path) -> dict[str, dict[str, Any]]:
    data = json.loads((cases / "configs" / "expected.json").read_text())["configs"]
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("name", sorted(SUPPORTED | set(SAME_SHAPES)))
def test_counts_equal_transformers(name: str, expected: dict[str, dict[str, Any]]) -> None:
    row = expected[SAME_SHAPES.get(name, name)]
    counts = count(resolve(load(name), None, "safetensors").spec)
    assert {
        "params_total": counts.total,
        "params_routed_experts": counts.routed_experts,
        "params_per_expert": counts.per_expert or None,
        "moe_layers": counts.moe_layers,
        "experts": counts.experts or None,
        "top_k": counts.top_k or None,
        "layers": resolve(load(name), None, "safetensors").spec.layers,
    } == {
        key: row.get(key)
        for key in (
            "params_total",
            "params_routed_experts",
            "params_per_expert",
            "moe_layers",
            "experts",
            "top_k",
            "layers",
        )
    }


def test_kimi_k2_counts_as_deepseek_v3(cases: Path) -> None:
    """The config is DeepSeek V3's under another model_type: same classes, same counts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load(KIMI_K2)
    counts = count(resolve(config, None, "safetensors").spec)
    for key in ("model_type", "quantization_config", "auto_map"):
        config.pop(key)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **config))
    assert counts.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [f for f in FILES if f not in SUPPORTED | set(SAME_SHAPES) | {KIMI_K2}])
def test_others_are_refused_by_name(name: str) -> None:
    config = load(name)
    shown = config.get("model_type") or config["architectures"][0]
    with pytest.raises((UnsupportedError, FileFormatError)) as refusal:
        resolve(config, None, "safetensors")
    assert shown in refusal.value.cause
    assert REFUSED_VALUES.get(name, "architecture") in refusal.value.cause


def test_no_supported_family_is_refused_unseen(cases: Path) -> None:
    """A config of a family that SUPPORTED has is itself in one of the lists."""
    families = {load(name)["model_type"] for name in SUPPORTED | {KIMI_K2}}
    for name in FILES:
        config = load(name)
        if config.get("model_type") not in families or name in REFUSED_VALUES:
            continue
        assert name in SUPPORTED | set(SAME_SHAPES) | {KIMI_K2}, name


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_spec_survives_the_manifest(name: str, cases: Path) -> None:
    from strata.plan.spec import ModelSpec

    spec = resolve(load(name), None, "safetensors").spec
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_quantization_and_architecture_are_named_together(cases: Path) -> None:
    with pytest.raises(StrataError, match=r"glm_moe_dsa.*NVFP4"):
        resolve(load("quantised/nvidia--GLM-5.1-NVFP4_config.json"), None, "safetensors")
