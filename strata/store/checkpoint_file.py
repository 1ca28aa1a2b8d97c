"""Read-only access to the files of a checkpoint, and the names in them that must not be believed."""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError, UsageError

DOWNLOAD_AGAIN = "incomplete download? Fetch the file again and compare its size with the publisher's"
BROKEN = "the file is broken or malicious; do not use it"
MAX_TENSOR_NAME = 1024
# Half of the safetensors format's own limit for headers: some five times the largest real one, and what
# can be parsed, or refused, within a second and 200 MB.
MAX_JSON_BYTES = 50_000_000
# Real headers have some 10 brackets and commas per tensor, so this is 400 000 tensors in one file;
# `[[],[],..` would turn 100 MB of JSON into gigabytes of Python objects.
MAX_JSON_ITEMS = 4_000_000
_LISTED = 1000
_SHOWN = 120


def shown(value: object) -> str:
    """A name or value from a file, made safe to print: escaped and cut before it is copied."""
    if isinstance(value, str | bytes):
        more = f"... ({len(value)} long)" if len(value) > _SHOWN else ""
        return ascii(value[:_SHOWN]) + more
    if isinstance(value, list | tuple):
        flat = len(value) <= _SHOWN // 8 and all(isinstance(v, int | float) for v in value)
        return str(list(value)) if flat else f"a list of {len(value)} values"
    return f"an object of {len(value)} keys" if isinstance(value, dict) else ascii(value)


def listed(names: list[str]) -> str:
    """All the names in one line; past a thousand the rest is counted."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class CheckpointFile:
    """One regular file, opened for reading. Owns the descriptor; closes it when collected.

    Rows are read with pread, not through the mapping: a file that shrinks or an I/O error then raises
    instead of killing the process with SIGBUS, and mapped pages do not count as resident memory.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises UsageError when it cannot be opened, FileFormatError when it is no file."""
        self.path = path
        try:
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):  # before open(): a FIFO would block
                raise FileFormatError(
                    f"{path}: not a regular file", remedy="name a .gguf or .safetensors file"
                )
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"{path}: cannot open: {reason}", remedy="check the path and its rights"
            ) from None
        weakref.finalize(self, os.close, self._fd)
        self.size = info.st_size
        self._map: mmap.mmap | None = None

    def mapping(self) -> mmap.mmap:
        """The whole file, mapped read-only (on first use); the file must not be empty."""
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return self._map

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A read-only view of the mapping, u8 `[nbytes]`."""
        if nbytes == 0:
            return np.frombuffer(b"", np.uint8)
        return np.frombuffer(self.mapping(), np.uint8, nbytes, offset)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of `nbytes` bytes, u8. Raises FileFormatError when the file has become shorter."""
        out = np.empty(nbytes, np.uint8)
        target = out.data
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise FileFormatError(
                    f"{self.path}: reading at byte {offset + done}: {error.strerror}"
                ) from error
            if got == 0:
                raise FileFormatError(
                    f"{self.path}: ends at byte {offset + done}, but data reaches {offset + nbytes}",
                    remedy="the file shrank while it was read; " + DOWNLOAD_AGAIN,
                )
            done += got
        return out

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """The same as bytes, for headers."""
        return self.read(offset, nbytes).tobytes()


def check_tensor_name(name: str, path: Path, limit: int = MAX_TENSOR_NAME) -> None:
    """Refuse names that could act as paths or break a terminal (case 04). Raises FileFormatError."""
    problem = ""
    if not name:
        problem = "is empty"
    elif len(name.encode("utf-8", "surrogatepass")) > limit:
        problem = f"is longer than {limit} bytes"
    elif ".." in name or "/" in name or "\\" in name:
        problem = "contains path characters"
    elif not name.isprintable():  # control characters, NUL, lone surrogates
        problem = "contains unprintable characters"
    if problem:
        raise FileFormatError(f"{path}: tensor name {shown(name)} {problem}", remedy=BROKEN)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. `where` names it in errors (FileFormatError)."""
    items = sum(data.count(mark) for mark in (b"{", b"[", b","))
    if items > MAX_JSON_ITEMS:
        raise FileFormatError(f"{where}: {items} values in the JSON, at most {MAX_JSON_ITEMS} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, where))
    except RecursionError:
        raise FileFormatError(f"{where}: the JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{where}: not UTF-8 at byte {error.start}", remedy=DOWNLOAD_AGAIN) from None
    except ValueError as error:
        raise FileFormatError(f"{where}: not JSON: {shown(str(error))}", remedy=DOWNLOAD_AGAIN) from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{where}: a JSON object is needed, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise FileFormatError(f"{where}: the key {shown(twice)} stands twice")
    return result


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object from a file (index, config). Raises FileFormatError, UsageError."""
    file = CheckpointFile(path)
    if file.size > MAX_JSON_BYTES:
        raise FileFormatError(f"{path}: {file.size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    return parse_json(file.read_bytes(0, file.size), str(path))


def inside(directory: Path, name: str, field: str) -> Path:
    """The path of a file that belongs to the checkpoint in `directory`; it need not exist.

    Refused (FileFormatError) when the name or a symlink leads outside. Hugging Face's cache is let
    through: `<repo>/snapshots/<revision>/<name>` may point to `<repo>/blobs/<hash>`.
    """
    outside = FileFormatError(
        f"{directory}: {field} {shown(name)} leads outside the model directory",
        remedy="copy the file into the directory, or name the file itself",
    )
    parts = re.split(r"[/\\]", name)
    if not name.isprintable() or not name or name[0] in "/\\" or ".." in parts or ":" in parts[0]:
        raise outside
    path = directory / name
    try:
        home, target = directory.resolve(), path.resolve()
    except (OSError, RuntimeError):  # a loop of symlinks
        raise outside from None
    if target.is_relative_to(home):
        return path
    in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not in_cache:
        raise outside
    return path
