"""From a GGUF file to a store and back to numbers, bit by bit against the gguf package's dequantizers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from fakes import small_spec

from strata.store.checkpoint import open_checkpoint
from strata.store.convert import convert
from strata.store.options import ConvertOptions
from strata.store.pack import unpack
from strata.store.reader import Store
from strata.store.source import SourceRows, TargetTensor

ROWS, COLS = 24, 512
EXACT = {
    "F32": "F32",
    "F16": "f16",
    "BF16": "bf16",
    "Q4_0": "w4g32",
    "Q4_1": "w4g32m",
    "Q8_0": "w8g32",
    "MXFP4": "mxfp4",
}


def quantized(kind: gguf.GGMLQuantizationType, values: np.ndarray) -> np.ndarray:
    """Bytes `[rows, bytes per row]`; types that the gguf package cannot quantize get random blocks."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(0)
        blocks = rng.integers(0, 256, (ROWS * COLS // size, nbytes), np.uint8)
        scale = rng.standard_normal((len(blocks), 2)).astype(np.float16).view(np.uint8)
        at = nbytes - 2 if kind.name == "Q6_K" else 0  # d (and dmin) lead, except in Q6_K
        width = 2 if kind.name == "Q6_K" else 4
        blocks[:, at : at + width] = scale[:, :width]
        return blocks.reshape(ROWS, -1)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """One tensor `w` `[ROWS, COLS]`; returns its values by the gguf package."""
    values = np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)
    data = quantized(kind, values)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.quants.dequantize(data, kind)


def convert_one(path: Path, out: Path, options: ConvertOptions) -> tuple[Store, np.ndarray]:
    source = open_checkpoint(path)
    target = TargetTensor("layers.0.attn.out.weight", (SourceRows("w"),), (ROWS, COLS), "shared")
    convert(source, small_spec(), [target], [], out, options)
    store = Store.open(out)
    return store, unpack(store.tensor(target.name))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_kept_types_are_exact(tmp_path: Path, kind: str) -> None:
    expected = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    store, found = convert_one(tmp_path / "m.gguf", tmp_path / "s", ConvertOptions())
    record = store.manifest.tensors["layers.0.attn.out.weight"]
    assert (record.format, record.exact, record.source) == (EXACT[kind], True, kind)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("kind", "fmt"), [("F16", "f16"), ("BF16", "bf16")])
def test_float_types_are_exact_in_their_own_format(tmp_path: Path, kind: str, fmt: str) -> None:
    expected = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    store, found = convert_one(tmp_path / "m.gguf", tmp_path / "s", ConvertOptions(shared=fmt))
    assert store.manifest.tensors["layers.0.attn.out.weight"].exact
    assert np.array_equal(found, expected)


def test_q4_k_loses_only_the_rounding_of_its_scales(tmp_path: Path) -> None:
    """Codes are kept; scale and minimum become fp16 products: 2**-11 of each at most."""
    kind = gguf.GGMLQuantizationType.Q4_K
    expected = write_gguf(tmp_path / "m.gguf", kind)
    store, found = convert_one(tmp_path / "m.gguf", tmp_path / "s", ConvertOptions())
    record = store.manifest.tensors["layers.0.attn.out.weight"]
    assert (record.format, record.exact) == ("w4g32m", False)
    groups = expected.reshape(-1, 32)
    terms = np.abs(groups).max(axis=1) + np.ptp(groups, axis=1)  # |scale * 15| and |minimum| are below this
    assert (np.abs(found.reshape(-1, 32) - groups).max(axis=1) <= 2.0**-10 * terms).all()


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_finer_types_are_requantized_to_eight_bits(tmp_path: Path, kind: str) -> None:
    expected = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    store, found = convert_one(tmp_path / "m.gguf", tmp_path / "s", ConvertOptions())
    record = store.manifest.tensors["layers.0.attn.out.weight"]
    assert (record.format, record.exact) == ("w8g32", False)
    step = np.abs(expected.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - expected).reshape(-1, 32) <= 0.502 * step).all()
