"""Directories, shards and indices: which files belong together, and what is missing (case-04, case-05)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors_bytes import build, entry, write_sharded

from strata.errors import FileFormatError, IncompleteError, StrataError, UnsupportedError, UsageError
from strata.store.checkpoint import open_checkpoint

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
F32X4 = entry("F32", [4], 0, 16)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / ONE)
    save_file({"b": np.arange(6, dtype=np.float16).reshape(2, 3)}, tmp_path / TWO)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ONE, "b": TWO}}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def check_whole(path: Path) -> None:
    source = open_checkpoint(path)
    assert source.tensors.keys() == {"a", "b"} and source.config == {"model_type": "llama"}
    assert source.rows("b", 1, 2).tolist() == [[3, 4, 5]]
    assert {p.name for p in source.files()} >= {ONE, TWO, "config.json"}


@pytest.mark.parametrize("named", ["", "model.safetensors.index.json", ONE, TWO])
def test_every_name_opens_the_whole_model(sharded: Path, named: str) -> None:
    check_whole(sharded / named)


@pytest.mark.parametrize("named", ["", ONE, TWO])
def test_a_complete_set_needs_no_index(sharded: Path, named: str) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    check_whole(sharded / named)


def test_a_plain_directory_and_a_file_of_it(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "consolidated.safetensors")
    assert open_checkpoint(tmp_path).tensors.keys() == {"a"}
    assert open_checkpoint(str(tmp_path / "consolidated.safetensors")).tensors.keys() == {"x"}


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    """case-05: counting 141 files is the program's work, not the user's."""
    names = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    write_sharded(tmp_path, {names[1]: {"t1": F32X4}}, {f"t{i}": name for i, name in enumerate(names)})
    for named in ("", "model.safetensors.index.json", names[1]):
        with pytest.raises(IncompleteError) as caught:
            open_checkpoint(tmp_path / named)
        assert all((name in caught.value.cause) == (name != names[1]) for name in names)
        assert "incomplete download?" in caught.value.remedy


def test_missing_shards_are_noticed_without_an_index(tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(build({"a": F32X4}, bytes(16)))
    for named in ("", ONE):
        with pytest.raises(IncompleteError, match=TWO):
            open_checkpoint(tmp_path / named)


def test_shards_counted_from_zero_need_their_index(tmp_path: Path) -> None:
    """gpt-oss numbers its three shards 00000 to 00002 "of 00002": the names do not tell how many."""
    (tmp_path / "model-00000-of-00002.safetensors").write_bytes(build({"a": F32X4}, bytes(16)))
    with pytest.raises(IncompleteError, match=r"index\.json is missing"):
        open_checkpoint(tmp_path)


def test_tensors_that_are_not_where_the_index_says_are_all_listed(tmp_path: Path) -> None:
    where = {"a": ONE, "b": ONE, "c": TWO, "d": TWO}
    index = write_sharded(tmp_path, {ONE: {"a": F32X4}, TWO: {"c": F32X4}}, where)
    with pytest.raises(IncompleteError) as caught:
        open_checkpoint(index)
    assert f"'b' (should be in {ONE}), 'd' (should be in {TWO})" in caught.value.cause


def test_a_tensor_in_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, {ONE: {"a": F32X4}, TWO: {"b": F32X4}}, {"a": TWO, "b": ONE})
    with pytest.raises(IncompleteError, match="not where the index says"):
        open_checkpoint(index)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """case-02: the tensor and both places are named."""
    name = "model.layers.0.mlp.gate.weight"
    index = write_sharded(
        tmp_path,
        {
            ONE: {name: F32X4},
            TWO: {
                name: F32X4,
            },
        },
        {name: ONE, "b": TWO},
    )
    with pytest.raises(FileFormatError, match=f"'{name}' is both in .*{ONE} and in .*{TWO}"):
        open_checkpoint(index)


def test_a_truncated_shard_is_found_before_any_work(sharded: Path) -> None:
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    with pytest.raises(FileFormatError, match=f"{TWO}: truncated"):
        open_checkpoint(sharded)


BAD_INDEX = {
    "no weight map": '{"metadata": {}}',
    "empty weight map": '{"weight_map": {}}',
    "weight map is a list": '{"weight_map": ["a"]}',
    "shard is a number": '{"weight_map": {"a": 1}}',
    "tensor twice": '{"weight_map": {"a": "x", "a": "y"}}',
    "not JSON": '{"weight_map"',
}


@pytest.mark.parametrize("text", BAD_INDEX.values(), ids=BAD_INDEX.keys())
def test_broken_indices_are_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(FileFormatError, match=r"index\.json"):
        open_checkpoint(index)


@pytest.mark.parametrize("config", ["[]", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_broken_config_is_refused(sharded: Path, config: str) -> None:
    (sharded / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(FileFormatError, match=r"config\.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "a\0b", "", "a" * 300]
)
def test_shard_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    """case-04: refused with the name, even where the file exists."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(build({"a": F32X4}, bytes(16)))
    index = write_sharded(folder, {}, {"a": name})
    with pytest.raises(StrataError) as caught:
        open_checkpoint(index)
    assert len(name) == 300 or "outside the model directory" in caught.value.cause


def test_a_shard_that_links_outside_is_refused(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """case-04: also when the link is in a folder that is itself reached through a link."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (sharded / TWO).rename(elsewhere / TWO)
    (sharded / TWO).symlink_to(elsewhere / TWO)
    alias = elsewhere / "alias"
    alias.symlink_to(sharded)
    for path in (sharded, sharded / ONE, alias):
        with pytest.raises(FileFormatError, match="outside the model directory"):
            open_checkpoint(path)


def test_a_config_that_links_outside_is_refused(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.json"
    secret.write_text("{}")
    (sharded / "config.json").unlink()
    (sharded / "config.json").symlink_to(secret)
    with pytest.raises(FileFormatError, match=r"'config\.json' leads outside"):
        open_checkpoint(sharded)


def cache_layout(sharded: Path, root: Path) -> Path:
    """The files moved to where huggingface_hub keeps them. Returns the snapshot."""
    blobs, snapshot = root / "models--x--y/blobs", root / "models--x--y/snapshots/0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / f"hash{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash{number}")
    return snapshot


def test_the_hugging_face_cache_works(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """case-04: snapshots -> blobs is the one link that may leave the directory."""
    snapshot = cache_layout(sharded, tmp_path_factory.mktemp("hub"))
    for named in ("", ONE, "model.safetensors.index.json"):
        check_whole(snapshot / named)


def test_a_cached_shard_without_its_blob_is_missing(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    snapshot = cache_layout(sharded, tmp_path_factory.mktemp("hub"))
    (snapshot / TWO).resolve().unlink()
    with pytest.raises(IncompleteError, match=TWO):
        open_checkpoint(snapshot)


def test_a_loop_of_links_is_refused(sharded: Path) -> None:
    (sharded / TWO).unlink()
    (sharded / TWO).symlink_to(TWO)
    with pytest.raises(FileFormatError):
        open_checkpoint(sharded)


def test_things_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no safetensors or GGUF"):
        open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="cannot open"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(StrataError, match=r"a\\x00b|null"):
        open_checkpoint("a\0b")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match="no safetensors or GGUF"):
        open_checkpoint(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UnsupportedError, match="pickle"):
            open_checkpoint(path)


def test_several_unrelated_files_are_a_question(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"a": np.zeros(4, np.float32)}, tmp_path / name)
    with pytest.raises(UsageError, match=r"a\.safetensors, b\.safetensors"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "a.safetensors").tensors.keys() == {"a"}


def test_asking_for_an_absent_tensor_is_an_incomplete_model(sharded: Path) -> None:
    source = open_checkpoint(sharded)
    for ask in (source.raw, lambda name: source.rows(name, 0, 1), lambda name: source.quantized(name, 0, 1)):
        with pytest.raises(IncompleteError, match="no tensor 'c'"):
            ask("c")
