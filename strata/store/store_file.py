"""Opening the files of a store, which another user or a broken disk may have put there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
