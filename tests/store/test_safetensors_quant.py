"""FP8 with block scales and gpt-oss's MXFP4 pairs, against torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from strata.errors import FileFormatError, IncompleteError, UnsupportedError
from strata.store.checkpoint import open_checkpoint
from strata.store.safetensors_quant import E4M3_TO_F32
from strata.store.source import CheckpointSource

FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def save(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> CheckpointSource:
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 100).to(torch.float8_e4m3fn)


def test_every_fp8_code_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_TO_F32, codes, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3_TO_F32[:255]), np.signbit(codes[:255]))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(40, 80), (3, 20, 64)])
def test_fp8_rows_are_scaled_by_their_block(
    tmp_path: Path, shape: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    weight = fp8(*shape)
    grid = (*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 32))
    scale = torch.exp2(torch.randn(grid).round()).to(scale_dtype)
    if scale_dtype != torch.float8_e8m0fnu:
        scale = (torch.rand(grid) + 0.1).to(scale_dtype)
    source = save(tmp_path, {"x.weight": weight, "x.weight_scale_inv": scale}, FP8_CONFIG)
    wide = scale.float().repeat_interleave(16, -2).repeat_interleave(32, -1)
    expected = (weight.float() * wide[..., : shape[-2], : shape[-1]]).reshape(-1, shape[-1]).numpy()

    assert source.tensors.keys() == {"x.weight"}
    info = source.tensors["x.weight"]
    assert (info.dtype, info.shape, info.nbytes) == ("F8_E4M3", shape, weight.numel())
    assert np.array_equal(source.rows("x.weight", 0, len(expected)), expected)
    assert np.array_equal(source.rows("x.weight", 15, 37), expected[15:37])
    assert source.quantized("x.weight", 0, 1) is None
    assert source.raw("x.weight_scale_inv").nbytes == scale.nbytes
    with pytest.raises(IncompleteError, match=r"no tensor 'x\.weight_scale_inv'"):
        source.rows("x.weight_scale_inv", 0, 1)


def test_all_missing_fp8_scales_are_listed(tmp_path: Path) -> None:
    tensors = {name: fp8(16, 32) for name in ("a.weight", "b.weight", "c.weight")}
    tensors["b.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(IncompleteError, match=r"'a\.weight_scale_inv', 'c\.weight_scale_inv'"):
        save(tmp_path, tensors, FP8_CONFIG)


@pytest.mark.parametrize("scale", [torch.ones(1, 1), torch.ones(2, 2), torch.ones(3, 1, dtype=torch.int32)])
def test_fp8_scales_of_another_shape_are_refused(tmp_path: Path, scale: torch.Tensor) -> None:
    with pytest.raises(FileFormatError, match=r"float tensor of shape \[3, 1\]"):
        save(tmp_path, {"a.weight": fp8(40, 32), "a.weight_scale_inv": scale}, FP8_CONFIG)


def test_fp8_without_blocks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"'a\.weight' is FP8, but config\.json has no weight_block_size"
    ):
        save(tmp_path, {"a.weight": fp8(4, 4)}, {})
    for block in (None, [16], [0, 16], "16"):
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
        with pytest.raises(UnsupportedError, match="FP8 needs weight_block_size"):
            save(tmp_path, {"a.weight": fp8(4, 4)}, config)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", None, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: Any, nested: bool) -> None:
    config: dict[str, Any] = {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedError, match=str(method)):
        save(tmp_path, {"a": torch.zeros(2)}, {"text_config": config} if nested else config)


def test_methods_of_real_models_are_judged_by_name(tmp_path: Path, cases: Path) -> None:
    """The published FP8 configurations are read; NVFP4 and mixtures are refused by name."""
    for path in sorted((cases / "configs/quantised").glob("*.json")):
        config = json.loads(path.read_text())
        found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        if not found:
            continue
        if path.name.endswith("FP8_config.json"):
            assert save(tmp_path, {"a": torch.zeros(2)}, config).config == config
        else:
            with pytest.raises(UnsupportedError, match=r"NVFP4|MIXED_PRECISION"):
                save(tmp_path, {"a": torch.zeros(2)}, config)


def test_older_modelopt_exports_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UnsupportedError, match="'modelopt' 'NVFP4'"):
        save(tmp_path, {"a": torch.zeros(2)}, {})


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[.., groups, 16]` with every byte value, and exponents around 1."""
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 140, shape, dtype=torch.uint8)


def test_mxfp4_pairs_are_one_tensor_and_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed(2, 6, 3)
    source = save(tmp_path, {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales})
    # transformers transposes to [experts, in, out] after unpacking
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).reshape(12, 96)

    assert source.tensors.keys() == {"e.gate_up_proj"}
    info = source.tensors["e.gate_up_proj"]
    assert (info.dtype, info.shape, info.nbytes) == ("MXFP4", (2, 6, 96), 2 * 6 * 3 * 17)
    assert np.array_equal(source.rows("e.gate_up_proj", 0, 12), theirs.numpy())
    assert np.array_equal(source.rows("e.gate_up_proj", 5, 8), theirs.numpy()[5:8])
    assert source.raw("e.gate_up_proj").tobytes() == blocks.numpy().tobytes()

    q = source.quantized("e.gate_up_proj", 5, 8)
    assert q is not None and q.exact and q.format == "mxfp4" and q.minimums is None
    scale = np.exp2(q.scales.astype(np.float32) - 127).repeat(32, axis=1)
    assert np.array_equal(E2M1[q.codes] * scale, theirs.numpy()[5:8])


def test_all_missing_mxfp4_scales_are_listed(tmp_path: Path) -> None:
    blocks, _ = packed(1, 2, 1)
    with pytest.raises(IncompleteError, match="'a_scales', 'b_scales'"):
        save(tmp_path, {"a_blocks": blocks, "b_blocks": blocks.clone()})


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1), (1, 2, 1, 1)])
def test_mxfp4_halves_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    blocks, _ = packed(1, 2, 1)
    with pytest.raises(FileFormatError, match="no MXFP4 pair"):
        save(tmp_path, {"a_blocks": blocks, "a_scales": torch.zeros(shape, dtype=torch.uint8)})
