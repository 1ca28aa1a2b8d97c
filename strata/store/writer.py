"""Writes a store's files in any order so that being killed at any moment loses minutes, not hours.

Everything happens in `<store>.partial/`, with `<store>.journal` beside it. A record counts once its bytes
are synced and journalled; files are sealed (read back and checksummed) and the manifest is written when
all records are there; one rename publishes the store.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from strata.config.units import format_bytes
from strata.errors import CapacityError, StoreError
from strata.store.journal import JOURNAL_BEGIN, Done, Journal
from strata.store.manifest import MANIFEST, SHARED, FileRecord
from strata.store.shards import Entry, ShardLayout

# Lost at most when killed, whichever comes first; one flush of the disk per 3 MB record would be too many.
_SYNC_BYTES = 128 << 20
_SYNC_SECONDS = 5.0
_READ_BYTES = 8 << 20
_STORE_NAMES = (MANIFEST, SHARED, "experts")
_SPARE_BYTES = 64 << 20  # manifest, tokenizer files, directories


def beside(out: Path, suffix: str) -> Path:
    """`<store>.partial`, `.journal`, `.lock`, `.replaced`: the names a conversion uses beside its store."""
    out = out.absolute()  # "." and "" have no name
    return out.parent / (out.name + suffix)


def check_output(out: Path, force: bool) -> None:
    """Refuse to touch what exists, unless `force` and it is a store or empty."""
    if not out.exists():
        return
    if not out.is_dir():
        raise StoreError(f"{out} exists and is no folder", remedy="choose another output")
    empty = not any(out.iterdir())
    if not empty and not (out / MANIFEST).is_file():
        raise StoreError(f"{out} exists and is not a store; it is left alone", remedy="choose another output")
    if not empty and not force:
        raise StoreError(f"{out} exists already", remedy="--force replaces it once the new store is complete")


def check_beside(out: Path) -> None:
    """StoreError for anything that has a conversion's name but that none made: it would be overwritten."""
    partial, replaced, journal = (beside(out, suffix) for suffix in (".partial", ".replaced", ".journal"))
    _refuse_unless(_is_journal(journal), journal)
    _refuse_unless(journal.exists() or not _holds_anything(partial), partial)
    _refuse_unless(
        not _holds_anything(replaced) or any((replaced / name).exists() for name in _STORE_NAMES), replaced
    )


def _refuse_unless(ours: bool, path: Path) -> None:
    if not ours:
        raise StoreError(
            f"{path} exists, but no conversion made it; it is left alone",
            remedy="move it away, or choose another output",
        )


def _is_journal(path: Path) -> bool:
    """Absent, or the beginning of a journal: of no bytes, torn, or zeros where a power cut lost its data."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(len(JOURNAL_BEGIN))
    return JOURNAL_BEGIN.startswith(begin) or not begin.strip(b"\0")


def _holds_anything(path: Path) -> bool:
    """Whether a folder has entries; what is no folder counts as one that has."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return any(path.iterdir())


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn a full disk and other write errors into errors that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(out.parent).free
            raise CapacityError(
                f"{out}: the disk is full ({format_bytes(free)} available)",
                remedy="free some space and run the same command again: it continues",
            ) from None
        raise StoreError(
            f"{error.filename or out}: {error.strerror}",
            remedy="choose an output folder (or model.cache_dir) that can be written",
        ) from None


def check_space(out: Path, shards: Iterable[ShardLayout]) -> None:
    """CapacityError unless what is still to be written fits; blocks already written count as done."""
    partial = beside(out, ".partial")
    needed = _SPARE_BYTES
    for shard in shards:
        path = partial / shard.path
        needed += max(0, shard.nbytes - (path.stat().st_blocks * 512 if path.exists() else 0))
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise CapacityError(
            f"{out}: needs {format_bytes(needed)}, {format_bytes(free)} are available on its disk",
            remedy="free some space, choose another disk, or smaller formats (e.g. --experts w4g64)",
        )


class StoreWriter:
    """The files of one conversion. `journal` says which records exist already."""

    def __init__(self, out: Path, shards: Iterable[ShardLayout], journal: Journal) -> None:
        self._out = out
        self._root = beside(out, ".partial")
        self._shards = {shard.path: shard for shard in shards}
        self._journal = journal
        self._pending: list[Done] = []
        self._pending_bytes = 0
        self._committed = time.monotonic()
        for shard in self._shards.values():
            self._prepare(shard)

    def _prepare(self, shard: ShardLayout) -> None:
        """Give a file its header and its size; records of earlier runs stay."""
        path = self._root / shard.path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, shard.nbytes)
            _write_all(descriptor, memoryview(shard.header), 0)
        finally:
            os.close(descriptor)

    def write(
        self, file: str, entry: Entry, pieces: Iterable[NDArray[np.uint8]], replaced: dict[str, int]
    ) -> None:
        """Write one record piece by piece; `replaced` is read after the last piece."""
        hasher, offset = xxhash.xxh3_64(), entry.offset
        descriptor = os.open(self._root / file, os.O_RDWR | os.O_CLOEXEC)
        try:
            for piece in pieces:
                _write_all(descriptor, piece.data, offset)
                hasher.update(piece.data)
                offset += piece.nbytes
        finally:
            os.close(descriptor)
        if offset != entry.offset + entry.nbytes:
            raise StoreError(
                f"{file}: {entry.name} came to {offset - entry.offset} bytes, not {entry.nbytes}"
            )
        self._pending.append(Done(file, entry.name, hasher.hexdigest(), dict(replaced)))
        self._pending_bytes += entry.nbytes
        if self._pending_bytes >= _SYNC_BYTES or time.monotonic() - self._committed >= _SYNC_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Sync what was written and journal it, in this order."""
        for file in dict.fromkeys(entry.file for entry in self._pending):
            _sync(self._root / file)
        self._journal.add(self._pending)
        self._pending, self._pending_bytes = [], 0
        self._committed = time.monotonic()

    def seal(self) -> list[FileRecord]:
        """Read every file back: each record must be what was journalled; returns the file table."""
        return [self._seal_file(shard) for shard in self._shards.values()]

    def _seal_file(self, shard: ShardLayout) -> FileRecord:
        hasher = xxhash.xxh3_64(shard.header)
        with (self._root / shard.path).open("rb") as file:
            file.seek(len(shard.header))
            for entry in shard.entries:
                record = xxhash.xxh3_64()
                for piece in _read_pieces(file.fileno(), entry.nbytes):
                    hasher.update(piece)
                    record.update(piece)
                if record.hexdigest() != self._journal.done[(shard.path, entry.name)].xxh3:
                    raise StoreError(
                        f"{self._root / shard.path}: {entry.name} is not what was written (disk error?)",
                        remedy=f"delete {self._root} and convert again",
                    )
        return FileRecord(shard.path, shard.nbytes, hasher.hexdigest())

    def finish(self, extra_files: Mapping[str, bytes], manifest: bytes) -> None:
        """Write the small files, the manifest last, and rename the whole into place."""
        for name, data in extra_files.items():
            _write_file(self._root / name, data)
        _write_file(self._root / MANIFEST, manifest)
        for folder in {self._root, *(path.parent for path in self._root.rglob("*"))}:
            _sync(folder)
        publish(self._out)


def publish(out: Path) -> None:
    """Rename `<store>.partial` to the store; an old store is moved aside first and removed afterwards.

    A process that has the old store mapped keeps its data: files are unlinked, never written.
    """
    old = beside(out, ".replaced")
    if out.exists():
        remove_tree(old)
        out.rename(old)
    beside(out, ".partial").rename(out)
    _sync(out.parent)
    beside(out, ".journal").unlink(missing_ok=True)
    remove_tree(old)


def remove_tree(path: Path) -> None:
    """Remove a folder of a conversion if it is there."""
    if path.exists():
        shutil.rmtree(path)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """fsync a file or folder; dirty pages belong to the file, whichever descriptor wrote them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_pieces(descriptor: int, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        piece = os.read(descriptor, min(nbytes, _READ_BYTES))
        if not piece:
            raise StoreError(
                "a file of the unfinished store became shorter", remedy="delete it and convert again"
            )
        nbytes -= len(piece)
        yield piece
