"""One writer per store or file of statistics: an flock'ed file beside it that names the holder's pid.

The kernel drops the lock with its process, so the file of a dead converter is stale by nature: the next
one takes it over.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.errors import LockedError, StoreError


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; LockedError naming the pid when another process holds it."""
    descriptor = _acquire(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while still locked, see _acquire
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}",
                remedy="choose an output folder (or model.cache_dir) that can be written",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise LockedError(
                f"process {holder} is writing it already ({path})",
                remedy=f"wait for it to end, or stop it: kill {holder}",
            ) from None
        if not _is_lock(descriptor):
            os.close(descriptor)
            raise StoreError(
                f"{path} exists, but is no lock of a conversion; it is left alone",
                remedy="move it away, or choose another output",
            )
        if _still_there(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder finished and removed the file between our open and our flock


def _is_lock(descriptor: int) -> bool:
    """Empty, or a pid: other programs have .lock files as well (poetry.lock, Cargo.lock)."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    text = os.pread(descriptor, 32, 0).strip()
    return not text or text.isdigit()


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
