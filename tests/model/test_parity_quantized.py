"""Quantized checkpoints: transformers gets the dequantized weights, we the quantized file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import parity
import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from strata.backends.reference import ReferenceBackend
from strata.store.options import ConvertOptions
from strata.store.reader import Store

BLOCK = 16
AUTO = ConvertOptions(shared="bf16", head="bf16", embed="bf16")


def check(model: Any, store: Store) -> None:
    ids = parity.tokens(small_models.VOCAB)[: parity.PROMPT + 2]
    logits = parity.strata_logits(store, ReferenceBackend(), ids, [parity.PROMPT])
    assert np.abs(logits - parity.transformers_logits(model, ids)).max() < 1e-4


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 codes, a power of two per block (so that bf16 holds the product), and the dequantized weight."""
    rows, cols = (-(-n // BLOCK) for n in weight.shape)
    scales = torch.pow(2.0, torch.randint(-6, -3, (rows, cols)).float())
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    codes = (weight / wide).clamp(-440, 440).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_fp8_blocks(case: str, tmp_path: Path) -> None:
    """Also rows taken from the middle of a block: kv_b is cut head by head."""
    model = small_models.save(case, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    quantized, plain = {}, {}
    for name, tensor in written.items():
        exempt = (
            "norm" in name or name.endswith(("gate.weight", "bias")) or "embed" in name or "lm_head" in name
        )
        if exempt:
            quantized[name] = plain[name] = tensor
            continue
        quantized[name], quantized[name + "_scale_inv"], plain[name] = to_fp8(tensor)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    save_file(plain, tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    rewrite(tmp_path, quantized, method)
    check(model.eval(), parity.to_store(tmp_path, tmp_path / "store"))


def test_mxfp4_gpt_oss(tmp_path: Path) -> None:
    """The published layout: X_blocks [experts, rows, groups, 16] with X_scales, kept without loss."""
    model = small_models.save("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, part in [(i, p) for i in range(2) for p in ("gate_up_proj", "down_proj")]:
        name = f"model.layers.{layer}.mlp.experts.{part}"
        experts, cols, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, cols // 32), dtype=torch.uint8)
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        parameter = getattr(model.model.layers[layer].mlp.experts, part)
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert values.shape == parameter.shape
        with torch.no_grad():
            parameter.copy_(values)
    rewrite(tmp_path, tensors, {"quant_method": "mxfp4"})
    store = parity.to_store(tmp_path, tmp_path / "store", AUTO)
    assert store.expert_layout(0).gate_up_format.name == "mxfp4"
    check(model, store)


@pytest.mark.parametrize("case", ["llama-tied", "mixtral", "granite"])
def test_q8_0_gguf_is_kept(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k rows come back into order without leaving their quantization."""
    model = small_models.build(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "router" not in name and "mlp.gate.weight" not in name:
                packed = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(values))
    add = gguf.GGUFWriter.add_tensor

    def add_quantized(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
        if values.ndim == 1 or "ffn_gate_inp" in name:
            add(writer, name, values)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        add(writer, name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_quantized)
    gguf_files.write(model, tmp_path / "m.gguf")
    store = parity.to_store(tmp_path / "m.gguf", tmp_path / "store", ConvertOptions())
    assert store.tensor("layers.0.attn.qkv.weight").shape.format.name == "w8g32"
    check(model, store)
