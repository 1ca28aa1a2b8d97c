"""The GGUF header: what is read, and what is refused before it is believed."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Gguf,
    array,
    key_value,
    strings,
    tensor_info,
    text,
)
from hangs import soon
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import FileFormatError, IncompleteError, StrataError, UnsupportedError
from strata.store import gguf_parse
from strata.store.checkpoint import open_checkpoint

ARCH = key_value("general.architecture", STRING, text("llama"))
BLOCK_COUNT = "llama.block_count"


def save(tmp_path: Path, content: bytes, name: str = "m.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def u32(key: str, value: int) -> bytes:
    return key_value(key, UINT32, struct.pack("<I", value))


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("x.flag", True)
    writer.add_array("x.numbers", [3, -4, 5])
    writer.add_token_list(["a", "é", "日本"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("blk.0.a.weight", matrix)
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = open_checkpoint(path)
    config = source.config
    assert source.kind == "gguf" and list(source.files()) == [path]
    assert config["general.architecture"] == "qwen3moe" and config["qwen3moe.block_count"] == 1
    assert config["x.flag"] is True and config["qwen3moe.rope.freq_base"] == 1e6
    assert config["x.numbers"].tolist() == [3, -4, 5]
    assert config["tokenizer.ggml.tokens"] == ["a", "é", "日本"]
    assert config["tokenizer.ggml.scores"].dtype == np.float32
    info = source.tensors["blk.0.a.weight"]
    assert (info.shape, info.dtype, info.nbytes) == ((3, 4), "F32", 48)
    assert np.array_equal(source.rows("blk.0.a.weight", 1, 3), matrix[1:])
    assert np.array_equal(source.rows("b", 0, 1), np.arange(5, dtype=np.float32)[None])
    assert np.array_equal(source.raw("blk.0.a.weight").view(np.float32).reshape(3, 4), matrix)


def test_raw_is_a_read_only_view_of_the_mapping(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path, Gguf().build()))
    raw = source.raw("a")
    assert raw.tobytes() == bytes(range(32)) and not raw.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1


def test_version_2_is_read(tmp_path: Path) -> None:
    assert "a" in open_checkpoint(save(tmp_path, Gguf(version=2).build())).tensors


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions_are_named(tmp_path: Path, version: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"{version}|big-endian"):
        open_checkpoint(save(tmp_path, Gguf(version=version).build()))


def test_big_endian_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_checkpoint(path)


BROKEN = {
    "nested array": (
        Gguf([key_value("k", ARRAY, array(ARRAY, 1, array(UINT32, 0, b"")))]),
        "unsupported type 9",
    ),
    "unknown value type": (Gguf([key_value("k", 13, b"")]), "value type 13"),
    "boolean of 2": (Gguf([key_value("k", BOOL, b"\2")]), "boolean of value 2"),
    "key of 65536 bytes": (Gguf([u32("k" * 65536, 1)]), "has 65536 bytes, at most 65535"),
    "key with a newline": (Gguf([u32("a\nb", 1)]), "metadata key 0"),
    "no dimensions": (Gguf(tensors=[tensor_info("a", [])]), "0 dimensions"),
    "five dimensions": (Gguf(tensors=[tensor_info("a", [1] * 5)]), "5 dimensions"),
    "zero dimension": (Gguf(tensors=[tensor_info("a", [4, 0])]), r"dimensions \[4, 0\]"),
    "duplicate tensor": (
        Gguf(tensors=[tensor_info("a", [4]), tensor_info("a", [4], 0, 32)]),
        "'a' stands twice",
    ),
    "row is no whole block": (Gguf(tensors=[tensor_info("a", [33], 2)]), "33 values .* block of 32"),
    "alignment 0": (Gguf([u32("general.alignment", 0)]), "alignment is 0"),
    "path in a name": (Gguf(tensors=[tensor_info("../../x", [8])]), "path characters"),
    "NUL in a name": (Gguf(tensors=[tensor_info("a\0b", [8])]), "unprintable"),
    "name of 65 bytes": (Gguf(tensors=[tensor_info("é" * 33, [8])]), "longer than 64"),
    "name is not UTF-8": (Gguf(tensors=[tensor_info(b"\xff", [8])]), "not UTF-8"),
    "more keys than bytes": (Gguf(key_count=100), "metadata count 100"),
    "more tensors than bytes": (Gguf(tensor_count=100), "tensor count 100"),
    "data is cut": (Gguf(data=bytes(31)), "truncated.*ends at byte"),
    "offset past the end": (Gguf(tensors=[tensor_info("a", [8], 0, 1 << 62)]), "truncated"),
    "block count 0": (Gguf([ARCH, u32(BLOCK_COUNT, 0)]), "block_count' is 0"),
    "block count is a string": (
        Gguf([ARCH, key_value(BLOCK_COUNT, STRING, text("2"))]),
        "block_count' is '2'",
    ),
    "architecture is a number": (Gguf([u32("general.architecture", 1)]), "not a string"),
    "tokens are numbers": (
        Gguf([key_value("tokenizer.ggml.tokens", ARRAY, array(UINT32, 1, bytes(4)))]),
        "tokens must be an array of strings, it is an array of uint32",
    ),
    "token is not UTF-8": (
        Gguf([key_value("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("a") + text(b"\xff")))]),
        r"tokens'\[1\] is not UTF-8",
    ),
    "token past the end": (
        Gguf([key_value("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", 1 << 40)))]),
        r"'k'\[1\] has 1099511627776 bytes",
    ),
}


@pytest.mark.parametrize(("file", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers_are_refused(tmp_path: Path, file: Gguf, message: str) -> None:
    """case-01, case-02, case-04: file, field and value are in the message."""
    path = save(tmp_path, file.build())
    with pytest.raises(FileFormatError, match=message) as caught:
        open_checkpoint(path)
    assert path.name in caught.value.cause


@pytest.mark.parametrize(("key", "kind"), [("scores", INT32), ("scores", UINT32), ("token_type", FLOAT32)])
def test_arrays_of_the_wrong_type_are_refused(tmp_path: Path, key: str, kind: int) -> None:
    """case-01: an array must not be read as a type it does not declare."""
    values = key_value(f"tokenizer.ggml.{key}", ARRAY, array(kind, 1, bytes(4)))
    with pytest.raises(FileFormatError, match=f"{key} must be an array of"):
        open_checkpoint(save(tmp_path, Gguf([ARCH, values]).build()))


@pytest.mark.parametrize(("key", "kind"), [("scores", FLOAT32), ("token_type", INT32)])
def test_arrays_shorter_than_the_vocabulary_are_refused(tmp_path: Path, key: str, kind: int) -> None:
    tokens = key_value("tokenizer.ggml.tokens", ARRAY, strings(["a", "b"]))
    values = key_value(f"tokenizer.ggml.{key}", ARRAY, array(kind, 1, bytes(4)))
    with pytest.raises(FileFormatError, match=f"{key} has 1 entries, tokenizer.ggml.tokens 2"):
        open_checkpoint(save(tmp_path, Gguf([ARCH, tokens, values]).build()))


def test_withdrawn_types_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'a' has the withdrawn type Q4_0_4_4 \(31\)"):
        open_checkpoint(save(tmp_path, Gguf(tensors=[tensor_info("a", [32], 31)]).build()))


@pytest.mark.parametrize(
    ("limit", "keys"),
    [
        (
            "MAX_STRINGS",
            [key_value("k", ARRAY, strings(["a"] * 3)), key_value("l", ARRAY, strings(["a"] * 3))],
        ),
        ("MAX_ELEMENTS", [key_value(k, ARRAY, array(UINT32, 3, bytes(12))) for k in "kl"]),
        ("MAX_KEYS", [u32(f"k{i}", i) for i in range(6)]),
        ("MAX_HEADER_BYTES", [key_value("k", STRING, text("x" * 100))]),
    ],
)
def test_headers_that_would_cost_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, keys: list[bytes]
) -> None:
    """case-01: a big file may not turn into many times its size of Python objects."""
    path = save(tmp_path, Gguf(keys).build())
    assert "a" in open_checkpoint(path).tensors
    monkeypatch.setattr(gguf_parse, limit, 64 if limit == "MAX_HEADER_BYTES" else 4)
    with pytest.raises(FileFormatError):
        open_checkpoint(path)


def blocks(count: int, present: list[int], *keys: bytes) -> bytes:
    infos = [tensor_info(f"blk.{b}.w", [8], 0, 32 * i) for i, b in enumerate(present)]
    return Gguf([ARCH, u32(BLOCK_COUNT, count), *keys], infos, bytes(32 * len(present))).build()


def test_missing_blocks_are_all_listed(tmp_path: Path) -> None:
    """case-05: an incomplete file is refused before any work."""
    with pytest.raises(IncompleteError, match=r"blk\.1, blk\.3") as caught:
        open_checkpoint(save(tmp_path, blocks(4, [0, 2])))
    assert "incomplete download?" in caught.value.remedy


def test_blocks_past_the_count_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="tensor of block 2"):
        open_checkpoint(save(tmp_path, blocks(2, [0, 1, 2])))


def test_prediction_blocks_may_be_left_out(tmp_path: Path) -> None:
    extra = u32("llama.nextn_predict_layers", 1)
    assert len(open_checkpoint(save(tmp_path, blocks(3, [0, 1], extra))).tensors) == 2


def test_a_vocabulary_without_tensors_is_read(tmp_path: Path) -> None:
    content = Gguf([ARCH, u32(BLOCK_COUNT, 32)], [], b"").build()
    assert open_checkpoint(save(tmp_path, content)).tensors == {}


def test_a_large_vocabulary_parses_fast(tmp_path: Path) -> None:
    """case-01: guards must not slow a good file. 150k tokens and merges: 0.10 s measured."""
    words = [f"token{i}" for i in range(150_000)]
    keys = [
        ARCH,
        key_value("tokenizer.ggml.tokens", ARRAY, strings(words)),
        key_value("tokenizer.ggml.merges", ARRAY, strings([w + " x" for w in words])),
        key_value("tokenizer.ggml.token_type", ARRAY, array(INT32, len(words), bytes(4 * len(words)))),
        key_value("tokenizer.ggml.scores", ARRAY, array(FLOAT32, len(words), bytes(4 * len(words)))),
    ]
    path = save(tmp_path, Gguf(keys).build())
    with soon():
        source = open_checkpoint(path)
    assert source.config["tokenizer.ggml.tokens"] == words


def test_a_file_that_shrinks_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = save(tmp_path, Gguf().build())
    source = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(FileFormatError, match="ends at byte"):
        source.rows("a", 0, 1)


def valid_file() -> bytes:
    keys = [
        ARCH,
        u32("general.alignment", 32),
        u32(BLOCK_COUNT, 1),
        key_value("tokenizer.ggml.tokens", ARRAY, strings(["a", "b", "c"])),
        key_value("tokenizer.ggml.scores", ARRAY, array(FLOAT32, 3, bytes(12))),
        key_value("general.quantized", BOOL, b"\1"),
    ]
    infos = [tensor_info("blk.0.a", [32, 2], 3), tensor_info("b", [8], 0, 64), tensor_info("c", [8], 1, 96)]
    return Gguf(keys, infos, bytes(range(112))).build()


def read_everything(path: Path) -> None:
    source = open_checkpoint(path)
    for name, info in source.tensors.items():
        rows = int(np.prod(info.shape[:-1]))
        assert source.rows(name, 0, rows).shape == (rows, info.shape[-1])
        source.quantized(name, 0, rows)


FUZZ = settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(
    flips=st.lists(st.tuples(st.integers(0, len(valid_file()) - 1), st.integers(1, 255)), max_size=4),
    keep=st.none() | st.integers(0, len(valid_file())),
)
def test_damaged_files_raise_only_our_errors(
    tmp_path: Path, flips: list[tuple[int, int]], keep: int | None
) -> None:
    """case-01, case-06: any flip or truncation is read or refused, within a second."""
    content = bytearray(valid_file())
    for position, mask in flips:
        content[position] ^= mask
    path = save(tmp_path, bytes(content[:keep]))
    try:
        read_everything(path)
    except StrataError as error:
        assert path.name in str(error)
    else:
        assert keep is None or keep >= len(content)


@FUZZ
@given(st.binary(max_size=200))
def test_noise_after_a_valid_start_raises_only_our_errors(tmp_path: Path, noise: bytes) -> None:
    path = save(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + noise)
    try:
        read_everything(path)
    except StrataError as error:
        assert path.name in str(error)
