"""Checks every byte of a store: file checksums, headers, padding, finite scales."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from strata.core import ExpertId
from strata.errors import StoreError
from strata.store.formats import ExpertLayout
from strata.store.manifest import FileRecord, read_manifest
from strata.store.pack import check_padding
from strata.store.reader import Bytes, Store, map_shard
from strata.store.shards import ShardLayout
from strata.store.store_file import open_store_file, remedy_of

_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class VerifyReport:
    """problems: one sentence per damaged or missing file, empty for a sound store."""

    files: int
    bytes: int
    problems: tuple[str, ...]


def verify_store(path: Path, progress: Callable[[int, int, str], None] | None = None) -> VerifyReport:
    """Read the whole store; progress(bytes done, bytes in all, file).

    Raises StoreError only where manifest or files may not be read; all other damage is in the report.
    """
    manifest = read_manifest(path)
    total = manifest.disk_bytes
    damaged: dict[str, str] = {}
    done = 0
    for entry in manifest.files:
        problem = _check_file(path, entry)
        if problem:
            damaged[entry.file] = problem
        done += entry.bytes
        if progress:
            progress(done, total, entry.file)
    sound = [shard for shard in manifest.shards() if shard.path not in damaged]
    problems = [*damaged.values(), *_check_headers(path, sound)]
    if not problems:
        problems += _check_contents(path)
    return VerifyReport(len(manifest.files), total, tuple(problems))


def check_small_files(path: Path) -> None:
    """Check the files beside the weights (tokenizer, template), which are read whole anyway.

    Raises StoreError: without its template a model would answer, but as if it had not been trained to chat.
    """
    manifest = read_manifest(path)
    shards = {shard.path for shard in manifest.shards()}
    for entry in manifest.files:
        problem = None if entry.file in shards else _check_file(path, entry)
        if problem:
            raise StoreError(
                f"{path}: {problem}", remedy="`strata verify` lists all damage; convert the model again"
            )


def _check_file(store: Path, entry: FileRecord) -> str | None:
    """What is wrong with a file's size or checksum; StoreError for a file that may not be read: no damage."""
    hasher = xxhash.xxh3_64()
    try:
        with open_store_file(store / entry.file) as file:
            size = file.seek(0, os.SEEK_END)
            if size != entry.bytes:
                return f"{entry.file}: {size} bytes, the manifest says {entry.bytes}"
            file.seek(0)
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    except OSError as error:
        if remedy := remedy_of(error):
            raise StoreError(f"{store / entry.file}: {error.strerror}", remedy=remedy) from None
        return f"{entry.file}: {error.strerror}"
    except StoreError as error:
        return error.cause
    found = hasher.hexdigest()
    return None if found == entry.xxh3 else f"{entry.file}: checksum {found}, the manifest says {entry.xxh3}"


def _check_headers(store: Path, shards: Iterable[ShardLayout]) -> Iterator[str]:
    """Headers that are not what the manifest describes (a matching checksum does not rule this out)."""
    for shard in shards:
        yield from _problem(map_shard, store, shard)


def _check_contents(path: Path) -> Iterator[str]:
    """Padding and scales of every matrix."""
    with Store.open(path) as store:
        for name, record in store.manifest.tensors.items():
            if not record.plain:
                yield from _problem(check_padding, store.tensor(name))
        for layer in store.manifest.layers:
            for index in range(store.manifest.expert_count):
                yield from _problem(_check_expert, store, ExpertId(layer, index))


def _problem(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """The sentence of the StoreError that a check raises, if it does."""
    try:
        check(*arguments)
    except StoreError as error:
        yield error.cause


def _check_expert(store: Store, expert: ExpertId) -> None:
    layout = store.expert_layout(expert.layer)
    for part in range(layout.slices):
        for tensor in store.expert_part(expert, part):
            check_padding(tensor)
    record = store.expert(expert)
    if _unused(layout, record).any():
        raise StoreError(f"expert {expert.index} of layer {expert.layer}: the record's padding is not zero")


def _unused(layout: ExpertLayout, record: Bytes) -> Bytes:
    """The bytes of a record that no matrix and no bias uses."""
    if not layout.biases:
        return record[layout.payload_bytes :]
    biases_end = layout.gate_up_bias_offset + layout.slices * layout.gate_up.rows * 4
    return np.concatenate([record[biases_end : layout.down_bias_offset], record[layout.payload_bytes :]])
