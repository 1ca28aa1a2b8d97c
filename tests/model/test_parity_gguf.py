"""The same model from GGUF: the same ModelSpec and the same logits as from Hugging Face's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import parity
import pytest
import small_models

from strata.backends.reference import ReferenceBackend
from strata.errors import UnsupportedError
from strata.model.architectures import BY_GGUF
from strata.model.resolve import resolve
from strata.plan.spec import ModelSpec
from strata.store.checkpoint import open_checkpoint

# What llama.cpp's files cannot say: windows of qwen, layers without experts between others, norm_topk_prob.
NOT_IN_GGUF = {"qwen2-window", "qwen3_moe-top1", "qwen2_moe", "qwen2_moe-dense-layer", "deepseek_v3-halves"}
CASES = {
    **{case: {} for case in small_models.CASES if case not in NOT_IN_GGUF | {"llama-llama3"}},
    "llama-8192": {},
    "qwen2_moe-every-layer": {},
    "glm4_moe with a nextn layer": {"mtp": True},
    "deepseek_v3 with kv_b whole": {"split_kv_b": False},
    "deepseek_v2-lite with kv_b whole": {"split_kv_b": False},
}
# Variants that GGUF can say.
EXTRA = {
    "llama-8192": (
        "llama",
        {
            "rope_parameters": {**small_models.LLAMA3, "original_max_position_embeddings": 8192},
            "attention_bias": True,
            "head_dim": 32,
        },
    ),
    "qwen2_moe-every-layer": (
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 56,
        },
    ),
}


def build(case: str, monkeypatch: pytest.MonkeyPatch) -> object:
    name = case.split(" ")[0]
    if name in EXTRA:
        monkeypatch.setitem(small_models.CASES, name, EXTRA[name])
    return small_models.build(name)


def comparable(spec: ModelSpec) -> ModelSpec:
    """Without names, and without what has no effect: GGUF does not tell mistral from llama."""
    return replace(spec, name="", architecture="")


@pytest.mark.parametrize("case", CASES)
def test_gguf_gives_the_same_spec_and_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(case, monkeypatch)
    model.save_pretrained(tmp_path / "hf")
    gguf_files.write(model, tmp_path / "m.gguf", **CASES[case])
    source = open_checkpoint(tmp_path / "hf")
    spec = resolve(source.config, source.tensors, "safetensors").spec
    store = parity.to_store(tmp_path / "m.gguf", tmp_path / "store")
    assert approximately(comparable(store.spec)) == approximately(comparable(spec))
    ids = parity.tokens(small_models.VOCAB)[: parity.PROMPT + 2]
    logits = parity.strata_logits(store, ReferenceBackend(), ids, [parity.PROMPT])
    assert np.abs(logits - parity.transformers_logits(model, ids)).max() < 1e-4


def approximately(value: object) -> object:
    """Floats to six digits: GGUF holds f32 where config.json holds decimals."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, ModelSpec):
        return approximately(value.to_json())
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    return value


def test_unknown_frequency_divisors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's four parameters are guessed from a table: another table must not pass for it."""
    model = build("llama-8192", monkeypatch)
    wrong = np.linspace(1, 8, 16, dtype=np.float32)
    monkeypatch.setattr(gguf_files, "llama3_divisors", lambda *_: wrong)
    gguf_files.write(model, tmp_path / "m.gguf")
    source = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        resolve(source.config, source.tensors, "gguf")


@pytest.mark.parametrize("name", sorted(BY_GGUF))
def test_names_are_those_of_the_gguf_package(name: str) -> None:
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[arch]}
    names = BY_GGUF[name].gguf_names
    assert names is not None
    used = {n.replace("{i}", "{bid}").removesuffix(".weight").removesuffix(".bias") for n in names.values()}
    # Our one table serves all families: it may name more than this one has, never less.
    optional = {"rope_freqs", "blk.{bid}.attn_rot_embd"}
    mtp = {n for n in known if ".nextn." in n}
    without_latents = {"blk.{bid}.attn_k", "blk.{bid}.attn_v"} if name == "deepseek2" else set()
    assert known - used - optional - mtp - without_latents == set()
    assert {"token_embd", "output_norm", "blk.{bid}.attn_norm", "blk.{bid}.attn_output"} <= used & known
