"""Which files make up a safetensors checkpoint, and do they all agree with each other?"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from strata.errors import FileFormatError, IncompleteError, UsageError
from strata.store.checkpoint_file import DOWNLOAD_AGAIN, CheckpointFile, inside, listed, read_json_file, shown
from strata.store.safetensors_parse import StoredTensor, parse_safetensors

INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class Shards:
    """directory: where config.json is looked for. files: every opened file in order.

    tensors: name -> (tensor, its file). described_by: the index, if there is one.
    """

    directory: Path
    files: list[Path]
    tensors: dict[str, tuple[StoredTensor, CheckpointFile]]
    described_by: tuple[Path, ...] = ()


def open_shards(path: Path) -> Shards:
    """Open all files that belong to `path`: a directory, an index, or a .safetensors file (if that is one
    of several shards, all of them). Headers are checked; missing shards and tensors are all listed
    (IncompleteError)."""
    if path.is_dir():
        return _open_directory(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    return _open_one(path)


def _open_directory(directory: Path) -> Shards:
    indices = [p.name for p in directory.glob("*" + INDEX_SUFFIX)]
    if INDEX_NAME in indices or len(indices) == 1:
        return _open_index(inside(directory, INDEX_NAME if INDEX_NAME in indices else indices[0], "index"))
    names = sorted(p.name for p in directory.glob("*.safetensors"))
    if not names:
        raise UsageError(f"{directory}: no .safetensors file", remedy="name a directory with a checkpoint")
    if "model.safetensors" in names:
        return _load(directory, ["model.safetensors"])
    stems = {found["stem"] for name in names if (found := SHARD_NAME.fullmatch(name))}
    if len(names) == 1 or (len(stems) == 1 and all(SHARD_NAME.fullmatch(name) for name in names)):
        return _load(directory, _siblings(directory, names[0]))
    raise UsageError(
        f"{directory}: several .safetensors files and no {INDEX_NAME}: {listed(names)}",
        remedy="fetch the index, or name one of the files",
    )


def _open_one(path: Path) -> Shards:
    """A single file; when the index beside it names it, or its own name counts shards, all of them."""
    index = path.with_name(INDEX_NAME)
    if index.is_file() and path.name in _weight_map(inside(path.parent, INDEX_NAME, "index")).values():
        return _open_index(index)
    if SHARD_NAME.fullmatch(path.name):
        return _load(path.parent, _siblings(path.parent, path.name))
    file = CheckpointFile(path)  # named by the user, so a symlink may lead anywhere
    tensors = parse_safetensors(file).tensors
    return Shards(path.parent, [path], {name: (t, file) for name, t in tensors.items()})


def _siblings(directory: Path, name: str) -> list[str]:
    """All shards of `stem-0000X-of-0000N`, or the file itself when its name does not count."""
    match = SHARD_NAME.fullmatch(name)
    if match is None:
        return [name]
    stem, count = match["stem"], int(match["count"])
    if (directory / f"{stem}-00000-of-{count:05d}.safetensors").exists():
        raise IncompleteError(
            f"{directory}: {INDEX_NAME} is missing, and shards counted from 0 do not say how many there are",
            remedy="incomplete download? Fetch the index file too",
        )
    names = [f"{stem}-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)]
    _require(directory, names)
    return names


def _require(directory: Path, names: list[str]) -> None:
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise IncompleteError(
            f"{directory}: {len(missing)} of {len(names)} shards are missing: {listed(missing)}",
            remedy="incomplete download? Fetch the missing files",
        )


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json_file(index).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise FileFormatError(f"{index}: no weight_map", remedy=DOWNLOAD_AGAIN)
    for name, shard in value.items():
        if not isinstance(shard, str):
            raise FileFormatError(f"{index}: the shard of {shown(name)} is {shown(shard)}, not a file name")
    return value


def _open_index(index: Path) -> Shards:
    weight_map = _weight_map(index)
    names = list(dict.fromkeys(weight_map.values()))
    paths = {name: inside(index.parent, name, f"{index.name}: shard") for name in names}
    _require(index.parent, names)
    shards = _load(index.parent, names)
    absent = [
        f"{shown(tensor)} (should be in {shard})"
        for tensor, shard in weight_map.items()
        if tensor not in shards.tensors or shards.tensors[tensor][1].path != paths[shard]
    ]
    if absent:
        raise IncompleteError(
            f"{index}: tensors are not where the index says: {listed(absent)}", remedy=DOWNLOAD_AGAIN
        )
    return replace(shards, described_by=(index,))


def _load(directory: Path, names: list[str]) -> Shards:
    files: list[Path] = []
    tensors: dict[str, tuple[StoredTensor, CheckpointFile]] = {}
    for name in names:
        file = CheckpointFile(inside(directory, name, "shard"))
        files.append(file.path)
        for tensor in parse_safetensors(file).tensors.values():
            if tensor.name in tensors:
                other = tensors[tensor.name][1].path
                raise FileFormatError(
                    f"tensor {shown(tensor.name)} is both in {other} and in {file.path}",
                    remedy="the shards belong to different versions; fetch them again",
                )
            tensors[tensor.name] = (tensor, file)
    return Shards(directory, files, tensors)
