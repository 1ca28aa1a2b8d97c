"""Models split by gguf-split: all parts whichever is named, or a list of what is missing (case-05)."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import STRING, UINT16, UINT32, Gguf, key_value, tensor_info, text

from strata.errors import FileFormatError, IncompleteError, UsageError
from strata.store.checkpoint import open_checkpoint

TENSORS = {f"t{i}": np.full((2, 4), i, np.float32) for i in range(5)}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """t0, t1 | t2, t3 | t4, written by the gguf package."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for name, value in TENSORS.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf"))


def part(number: int, count: int, name: str, promised: int = 2) -> bytes:
    keys = [
        key_value("general.architecture", STRING, text("llama")),
        key_value("split.no", UINT16, struct.pack("<H", number)),
        key_value("split.count", UINT16, struct.pack("<H", count)),
        key_value("split.tensors.count", UINT32, struct.pack("<I", promised)),
    ]
    return Gguf(keys, [tensor_info(name, [8])]).build()


def write_pair(folder: Path, first: bytes, second: bytes) -> Path:
    for number, content in enumerate((first, second), start=1):
        (folder / f"m-{number:05d}-of-00002.gguf").write_bytes(content)
    return folder / "m-00001-of-00002.gguf"


def test_any_part_opens_the_whole_model(parts: list[Path]) -> None:
    assert [p.name for p in parts] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (*parts, parts[0].parent):
        source = open_checkpoint(path)
        assert list(source.files()) == parts
        assert source.config["general.architecture"] == "llama"
        assert source.tensors["t3"].file == parts[1]
        for name, value in TENSORS.items():
            assert np.array_equal(source.rows(name, 0, 2), value)


@pytest.mark.parametrize("named", [0, 1, 2])
def test_all_missing_parts_are_listed(parts: list[Path], named: int) -> None:
    missing = [p for p in parts if p != parts[named]]
    for path in missing:
        path.unlink()
    with pytest.raises(IncompleteError) as caught:
        open_checkpoint(parts[named])
    assert all(path.name in caught.value.cause for path in missing)
    assert "incomplete download?" in caught.value.remedy


def test_a_truncated_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-40])
    with pytest.raises(FileFormatError, match=r"00002-of-00003.*truncated"):
        open_checkpoint(parts[0])


def test_a_part_in_the_wrong_place_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(FileFormatError, match=r"00002-of-00003.gguf: says split.no 2"):
        open_checkpoint(parts[0])


def test_a_renamed_part_is_refused(parts: list[Path]) -> None:
    with pytest.raises(IncompleteError, match="one of 3 parts"):
        open_checkpoint(parts[0].rename(parts[0].with_name("model.gguf")))
    with pytest.raises(FileFormatError, match=r"says 2 parts, split.count says 3"):
        open_checkpoint(parts[1].rename(parts[1].with_name("m-00002-of-00002.gguf")))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    """case-02: both places are named."""
    path = write_pair(tmp_path, part(0, 2, "a"), part(1, 2, "a"))
    with pytest.raises(FileFormatError, match=r"'a' is both in .*00001-of-00002.* and in .*00002-of-00002"):
        open_checkpoint(path)


def test_fewer_tensors_than_promised_is_incomplete(tmp_path: Path) -> None:
    path = write_pair(tmp_path, part(0, 2, "a", promised=3), part(1, 2, "b"))
    with pytest.raises(IncompleteError, match="says 3, the parts hold 2"):
        open_checkpoint(path)


def test_a_part_that_links_outside_is_refused(tmp_path: Path) -> None:
    """case-04: nothing outside the folder is opened on behalf of another file."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_pair(folder, part(0, 2, "a"), part(1, 2, "b"))
    second = folder / "m-00002-of-00002.gguf"
    second.rename(tmp_path / "elsewhere.gguf")
    second.symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(FileFormatError, match="outside the model directory"):
        open_checkpoint(path)


def test_two_models_in_a_directory_are_a_question(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(Gguf().build())
    with pytest.raises(UsageError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "mmproj-b.gguf")
    assert open_checkpoint(tmp_path).path.name == "a.gguf"


def test_files_named_by_their_hash_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "sha256-1234"
    path.write_bytes(Gguf().build())
    assert open_checkpoint(path).kind == "gguf"
