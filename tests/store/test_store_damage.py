"""Stores that were cut, changed or forged: an error with names and numbers, never zeros or a traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from fakes import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert import run

from strata.core import ExpertId
from strata.errors import StoreError
from strata.store.manifest import Manifest, read_manifest
from strata.store.reader import Store
from strata.store.verify import check_small_files, verify_store


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store") / "s"
    run(small_model(), store, extra_files={"tokenizer.json": b"{}"})
    return store


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "s")
    return tmp_path / "s"


def forge(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a matching checksum."""
    data = json.loads((store / "manifest.json").read_text())
    change(data)
    data.pop("checksum", None)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
    (store / "manifest.json").write_text(json.dumps(data))


def test_manifest_comes_back_unchanged(original: Path) -> None:
    manifest = read_manifest(original)
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest
    assert manifest.to_bytes() == (original / "manifest.json").read_bytes()


def open_descriptors() -> set[int]:
    folder = Path("/proc/self/fd")
    listed = list(folder.iterdir())  # the folder's own descriptor among them, which is closed now
    return {int(entry.name) for entry in listed if (folder / entry.name).is_symlink()}


def test_too_few_descriptors_is_not_damage(original: Path) -> None:
    """The error must send nobody to convert a sound store again, and leak nothing."""
    with few_descriptors(0), pytest.raises(StoreError, match="Too many open files") as caught:
        Store.open(original)
    assert "ulimit -n" in caught.value.remedy


def test_an_open_store_holds_no_descriptor(original: Path) -> None:
    """However many files it has, one descriptor opens them all."""
    Store.open(original)  # loads the extension, which takes descriptors, too
    before = open_descriptors()
    with few_descriptors(1):
        store = Store.open(original)
    assert open_descriptors() == before
    assert store.expert(ExpertId(1, 2)).any()


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """This process may open `count` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = sorted(set(range(soft)) - open_descriptors())
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("file", ["shared.safetensors", "experts/expert-002.safetensors"])
@pytest.mark.parametrize("cut", [1, 4096, 10**9])
def test_truncated_shards_do_not_open(store: Path, file: str, cut: int) -> None:
    path = store / file
    size = path.stat().st_size
    with path.open("r+b") as shard:
        shard.truncate(max(0, size - cut))
    with pytest.raises(StoreError, match=f"has {max(0, size - cut)} bytes, the manifest says {size}"):
        Store.open(store)
    assert any(file in problem for problem in verify_store(store).problems)


def test_missing_shard(store: Path) -> None:
    (store / "experts" / "expert-001.safetensors").unlink()
    with pytest.raises(StoreError, match="expert-001"):
        Store.open(store)
    assert verify_store(store).problems == ("experts/expert-001.safetensors: No such file or directory",)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_every_flipped_bit_is_found_by_verify(original: Path, position: int) -> None:
    for file in ("shared.safetensors", "experts/expert-003.safetensors", "tokenizer.json"):
        path = original / file
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[position % len(before)] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            problems = verify_store(original).problems
        finally:
            path.write_bytes(before)
        assert len(problems) == 1
        assert problems[0].startswith(f"{file}: checksum ")


def test_changed_header_does_not_open(store: Path) -> None:
    path = store / "experts" / "expert-000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"I8"', 1))
    with pytest.raises(StoreError, match="its header is not the one the manifest describes"):
        Store.open(store)


def test_padding_is_verified_even_when_checksums_were_forged(store: Path) -> None:
    path = store / "experts" / "expert-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] = 7
    path.write_bytes(data)

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            if entry["file"] == "experts/expert-000.safetensors":
                entry["xxh3"] = xxhash.xxh3_64_hexdigest(bytes(data))

    forge(store, change)
    assert verify_store(store).problems == ("expert 0 of layer 1: the record's padding is not zero",)


def test_edited_manifest_is_refused(store: Path) -> None:
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text.replace('"hidden": 96', '"hidden": 97', 1))
    with pytest.raises(StoreError, match="was changed after conversion"):
        Store.open(store)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """A change of one field, named by its path."""

    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            data = data[int(key)] if isinstance(data, list) else data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", 2), "format version 2, this Strata reads version 1"),
        (put("version", None), "format version None"),
        (put("kind", "other"), "is not the manifest of a store"),
        (put("surprise", 1), "unknown or missing fields: surprise"),
        (lambda data: data.pop("tool"), "unknown or missing fields: tool"),
        (put("spec/layers", "many"), "spec.layers is 'many'"),
        (put("spec/attention/scale", None), "attention.scale is None"),
        (put("spec/surprise", 1), "surprise"),
        (put("spec", []), "TypeError"),
        (put("tensors/embed.weight/format", "w5"), "format 'w5'"),
        (put("tensors/embed.weight/shape", [70]), r"shape \(70,\)"),
        (put("tensors/embed.weight/shape", [-70, 96]), r"sizes \(-70, 96\)"),
        (put("tensors/embed.weight/shape", [10**15, 96]), "sizes"),
        (put("tensors/embed.weight/shape", [71, 1000]), "bytes by the table"),
        (put("tensors", 5), "AttributeError"),
        (put("layers/1/slices", 0), r"sizes \(96, 128, 0\)"),
        (put("layers/1/slices", 3), "width 128 in 3 slices"),
        (put("layers/1/biases", "yes"), "biases is 'yes'"),
        (put("layers/1/down", "w4"), "formats"),
        (put("layers/9", {}), "TypeError"),
        (put("expert_count", 10**12), "expert_count is 1000000000000"),
        (put("expert_count", True), "expert_count is True"),
        (put("files/0/file", "../../etc/passwd"), "etc/passwd' in the file table"),
        (put("files/0/bytes", 1), "1 bytes by the table"),
        (put("replaced", [1]), "replaced"),
    ],
)
def test_forged_manifests_are_refused(
    store: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    forge(store, change)
    with pytest.raises(StoreError, match=message):
        Store.open(store)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, "\x00\xff", '{"kind": "strata-store"}']
)
def test_manifests_that_are_none(store: Path, text: str) -> None:
    (store / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Store.open(store)


def test_extra_files_of_a_forged_table_stay_inside(store: Path) -> None:
    """`verify` reads what the table lists: never a path outside the store."""
    forge(store, lambda data: data["files"].append({"file": "../outside", "bytes": 1, "xxh3": "0"}))
    with pytest.raises(StoreError, match=r"\.\./outside"):
        verify_store(store)


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {tmp_path: "it holds no manifest.json", tmp_path / "file": "a file, and a store is a folder"}
    for path, reason in {**found, tmp_path / "absent": "there is no such folder"}.items():
        with pytest.raises(StoreError, match=f"{re.escape(str(path))} is no store: .*{reason}\n"):
            Store.open(path)


def test_questions_a_store_cannot_answer(original: Path) -> None:
    store = Store.open(original)
    with pytest.raises(StoreError, match="holds no tensor nothing"):
        store.tensor("nothing")
    with pytest.raises(StoreError, match=r"final_norm\.weight is plain"):
        store.tensor("final_norm.weight")
    with pytest.raises(StoreError, match=r"embed\.weight is packed"):
        store.plain("embed.weight")
    with pytest.raises(StoreError, match="layer 0 has no routed experts"):
        store.expert(ExpertId(0, 0))
    with pytest.raises(StoreError, match="expert 4 of 4"):
        store.expert(ExpertId(1, 4))
    with pytest.raises(ValueError, match="read-only"):
        store.expert(ExpertId(1, 0))[0] = 1
    kept = store.expert(ExpertId(1, 1))
    store.close()
    assert kept.any()
    with pytest.raises(StoreError, match="is closed"):
        store.expert(ExpertId(1, 0))


def test_records_are_aligned_in_memory(original: Path) -> None:
    """One DMA or direct read takes a whole record; kernels load 64 bytes at a time."""
    store = Store.open(original)
    for index in range(4):
        assert store.expert(ExpertId(1, index)).ctypes.data % 4096 == 0
    assert store.tensor("layers.0.mlp.gate_up.weight").data.ctypes.data % 64 == 0
    assert store.shape("embed.weight") == (70, 96)
    assert np.isfinite(store.plain("layers.1.router.weight")).all()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "sparse"])
@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "tokenizer.json"])
def test_what_is_no_regular_file_is_not_read(store: Path, name: str, kind: str) -> None:
    """A FIFO blocked for ever, /dev/zero has no end, and a sparse file of terabytes takes hours to check."""
    path = store / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 42)
    message = "4398046511104 bytes|is no JSON" if kind == "sparse" else "is not a regular file"
    if name == "manifest.json":
        with pytest.raises(StoreError, match=message):
            verify_store(store)
        return
    assert re.search(message, verify_store(store).problems[0])
    with pytest.raises(StoreError, match=message):
        Store.open(store) if name == "shared.safetensors" else check_small_files(store)


@pytest.mark.parametrize("path", [Path(), Path("/"), Path("..")])
def test_folders_without_a_name_are_no_stores(path: Path) -> None:
    with pytest.raises(StoreError, match="is no store"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("spec", "layers", 10**9), ("attention", "kv_heads", 0), ("rope", "rotary_dim", 1 << 31)],
)
def test_numbers_of_the_spec_are_checked(store: Path, part: str, name: str, value: int) -> None:
    """A forged checksum is easily made: nothing may be sized by such a number, or divided by it."""

    def change(data: dict[str, Any]) -> None:
        spec = data["spec"]
        parts = {"spec": spec, "attention": spec["attention"], "rope": spec["attention"]["rope"]}
        parts[part][name] = value

    forge(store, change)
    with pytest.raises(StoreError, match=f"{name} is {value}, expected"):
        read_manifest(store)


@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_not_damage(
    store: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy must send nobody to convert a sound store again. Root reads everything: hence the patch."""
    opened = Path.open

    def guarded(path: Path, *arguments: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", guarded)
    calls: list[Callable[[Path], object]] = [verify_store]
    calls.append(check_small_files if name == "tokenizer.json" else Store.open)
    for call in calls:
        with pytest.raises(StoreError, match=f"{name}: Permission denied") as caught:
            call(store)
        assert "check the rights" in caught.value.remedy
