"""Opening the files of a store, which another user or a broken disk may have put there."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

from strata.errors import StoreError


def open_store_file(path: Path) -> BinaryIO:
    """Open for reading. Raises StoreError for what is no regular file, OSError where it cannot be opened."""
    if not stat.S_ISREG(path.stat().st_mode):  # before open(): a FIFO blocks there, a device has no end
        raise StoreError(f"{path} is not a regular file", remedy="convert the model again")
    return path.open("rb")
