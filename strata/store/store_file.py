"""Opening the files of a store, which another user or a broken disk may have put there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from strata.errors import StoreError

# Mappings keep no descriptor, so a process that meets these has its own elsewhere: sockets, other files.
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
    errno.ENFILE: "raise the limit of open files of the whole system: sysctl fs.file-max",
    errno.EACCES: "check the rights of the store's files and folders",
    errno.EPERM: "check the rights of the store's files and folders",
}


def remedy_of(error: OSError) -> str:
    """What helps against an error that is no damage of the file; "" for others."""
    return _REMEDIES.get(error.errno or 0, "")


def open_store_file(path: Path) -> BinaryIO:
    """Open for reading. Raises StoreError for what is no regular file, OSError where it cannot be opened."""
    if not stat.S_ISREG(path.stat().st_mode):  # before open(): a FIFO blocks there, a device has no end
        raise StoreError(f"{path} is not a regular file", remedy="convert the model again")
    return path.open("rb")


@dataclass(frozen=True)
class SideFile:
    """A JSON file that a store may do without: measured about one thing, meaningless beside another.

    holds: what messages call it. owner: the field that names what it belongs to, which they call `other`.
    """

    kind: str
    version: int
    holds: str
    owner: str
    other: str
    most_bytes: int

    def read(self, path: Path, owner: str) -> dict[str, Any]:
        """The fields. Raises ValueError for what is too large, no such file, of another version or owner;

        besides OSError, StoreError (no regular file) and RecursionError (nested without end).
        """
        with open_store_file(path) as file:
            text = file.read(self.most_bytes + 1)
        if len(text) > self.most_bytes:
            raise ValueError(f"more than {self.most_bytes} bytes")
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("kind") != self.kind:
            raise ValueError(f"it holds no {self.holds}")
        if data.get("version") != self.version:
            found = str(data.get("version"))[:20]
            raise ValueError(f"it has version {found}, this Strata writes {self.version}")
        if data.get(self.owner) != owner:
            raise ValueError(f"it belongs to another {self.other}")
        return data

    def head(self, owner: str) -> dict[str, Any]:
        """The fields that `read` asks for."""
        return {"kind": self.kind, "version": self.version, self.owner: owner}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside `path`, sync it, and rename it over: a reader sees the old or the new one."""
    with _temporary(path) as (descriptor, name):
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
        name.replace(path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, Path]]:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        yield descriptor, Path(name)
    finally:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)  # gone already where it was renamed
