"""The safetensors header: what is read, and what is refused before it is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from safetensors_bytes import build, entry

from strata.errors import FileFormatError, StrataError, UnsupportedError
from strata.store import checkpoint_file
from strata.store.checkpoint import open_checkpoint

F32X4 = entry("F32", [4], 0, 16)


def save(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    return path


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(2, 3, 4).half(),
        "bf16": torch.randn(7).bfloat16(),
        "f64": torch.randn(2, 2).double(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(4),
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    source = open_checkpoint(path)
    assert source.kind == "safetensors" and source.config == {} and list(source.files()) == [path]
    for name, tensor in tensors.items():
        info = source.tensors[name]
        assert info.shape == tuple(tensor.shape) and info.nbytes == tensor.nbytes
        assert source.quantized(name, 0, 0) is None
        if name == "ids":
            continue
        rows = int(np.prod(tensor.shape[:-1]))
        expected = tensor.float().reshape(rows, tensor.shape[-1] if tensor.shape else 1).numpy()
        assert np.array_equal(source.rows(name, 0, rows), expected)
    assert np.array_equal(source.rows("f16", 2, 5), tensors["f16"].float().reshape(6, 4)[2:5].numpy())
    assert source.raw("f32").tobytes() == tensors["f32"].numpy().tobytes()
    with pytest.raises(UnsupportedError, match="'ids' of dtype I64"):
        source.rows("ids", 0, 1)


def test_raw_is_a_read_only_view_of_the_mapping(tmp_path: Path) -> None:
    raw = open_checkpoint(save(tmp_path, build({"a": F32X4}, bytes(range(16))))).raw("a")
    assert raw.tobytes() == bytes(range(16)) and not raw.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1


def text_of(*members: str) -> str:
    return "{" + ",".join(members) + "}"


A = '"a":' + json.dumps(F32X4)
BROKEN: dict[str, tuple[bytes, str]] = {
    "seven bytes": (bytes(7), "7 bytes"),
    "name twice": (build(text_of(A, A), bytes(16)), "key 'a' stands twice"),
    "field twice": (
        build('{"a":{"dtype":"F32","dtype":"F16","shape":[4],"data_offsets":[0,16]}}'),
        "'dtype' stands",
    ),
    "deep nesting": (build("[" * 100_000), "nested too deeply"),
    "a list": (build("[]"), "JSON object is needed, got list"),
    "huge number": (build('{"a":' + "9" * 5000 + "}"), "not JSON"),
    "unknown field": (build({"a": {**F32X4, "x": 1}}, bytes(16)), "must have dtype, shape and data_offsets"),
    "no shape": (build({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, bytes(16)), "must have dtype"),
    "entry is a number": (build({"a": 1}), "must have dtype"),
    "boolean dimension": (build({"a": entry("U8", [True], 0, 1)}, bytes(1)), r"shape \[True\]"),
    "negative dimension": (build({"a": entry("U8", [-1, -1], 0, 1)}, bytes(1)), r"shape \[-1, -1\]"),
    "one offset": (build({"a": {**F32X4, "data_offsets": [16]}}, bytes(16)), "needs 16 bytes"),
    "shape and bytes disagree": (build({"a": entry("F32", [5], 0, 16)}, bytes(16)), "needs 20 bytes"),
    "wrapping shape": (build({"a": entry("U8", [1 << 62, 1 << 62, 16], 0, 0)}), "needs 3402"),
    "thousands of dimensions": (
        build({"a": entry("U8", [2**62] * 5000, 0, 0)}),
        "impossible shape a list of 5000",
    ),
    "half bytes": (build({"a": entry("F4", [3], 0, 1)}, bytes(1)), "impossible shape"),
    "trailing bytes": (build({"a": F32X4}, bytes(17)), "belong to no tensor"),
    "one byte short": (build({"a": F32X4}, bytes(15)), "truncated: the tensors end at byte"),
    "path in a name": (build({"../a": F32X4}, bytes(16)), "path characters"),
    "NUL in a name": (build({"a\0": F32X4}, bytes(16)), "unprintable"),
    "lone surrogate": (build('{"\\ud800":' + json.dumps(F32X4) + "}", bytes(16)), "unprintable"),
    "empty name": (build({"": F32X4}, bytes(16)), "is empty"),
    "metadata is a list": (build({"__metadata__": [], "a": F32X4}, bytes(16)), "__metadata__ is list"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """case-02, case-04, case-06: file, tensor and byte counts are in the message."""
    with pytest.raises(FileFormatError, match=message) as caught:
        open_checkpoint(save(tmp_path, content))
    assert "m.safetensors" in caught.value.cause
    assert len(caught.value.cause) < 1000 and caught.value.cause.encode("ascii")


def test_unknown_dtypes_are_named(tmp_path: Path) -> None:
    for dtype in ("F128", ["F32"], None):
        with pytest.raises(UnsupportedError, match="'a' has the unknown dtype"):
            open_checkpoint(save(tmp_path, build({"a": {**F32X4, "dtype": dtype}}, bytes(16))))


def test_headers_that_would_cost_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, build({"a": F32X4}, bytes(16)))
    monkeypatch.setattr(checkpoint_file, "MAX_JSON_ITEMS", 3)
    with pytest.raises(FileFormatError, match="values in the JSON, at most 3"):
        open_checkpoint(path)


def test_a_file_that_shrinks_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = save(tmp_path, build({"a": F32X4}, bytes(16)))
    source = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(FileFormatError, match="ends at byte"):
        source.rows("a", 0, 1)


VALID = build(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 4], 0, 32),
        "w_blocks": entry("U8", [2, 1, 16], 32, 64),
        "w_scales": entry("U8", [2, 1], 64, 66),
        "b": entry("BF16", [3], 66, 72),
    },
    bytes(range(72)),
)
FUZZ = settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_everything(path: Path) -> None:
    source = open_checkpoint(path)
    for name, info in source.tensors.items():
        rows = int(np.prod(info.shape[:-1], dtype=object))
        source.quantized(name, 0, rows)
        values = source.rows(name, 0, rows)
        assert values.shape == (rows, info.shape[-1] if info.shape else 1)


@FUZZ
@given(
    flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)), max_size=3),
    keep=st.none() | st.integers(0, len(VALID)),
)
def test_damaged_files_raise_only_our_errors(
    tmp_path: Path, flips: list[tuple[int, int]], keep: int | None
) -> None:
    """case-06: any flip or truncation is read or refused, within a second."""
    content = bytearray(VALID)
    for position, mask in flips:
        content[position] ^= mask
    path = save(tmp_path, bytes(content[:keep]))
    try:
        read_everything(path)
    except StrataError as error:
        assert path.name in str(error)
    else:
        assert keep is None or keep >= len(content)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F8_E4M3", "F4"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-2, 8), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-2, 40), max_size=3) | JSON_VALUES,
    },
)


@FUZZ
@given(st.dictionaries(st.text(max_size=4), FIELDS | JSON_VALUES, max_size=3), st.binary(max_size=40))
def test_any_json_raises_only_our_errors(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    path = save(tmp_path, build(header, data))
    try:
        read_everything(path)
    except StrataError as error:
        assert path.name in str(error)


@FUZZ
@given(st.binary(max_size=60))
def test_noise_raises_only_our_errors(tmp_path: Path, noise: bytes) -> None:
    path = save(tmp_path, struct.pack("<Q", len(noise)) + noise)
    try:
        read_everything(path)
    except StrataError as error:
        assert path.name in str(error)
