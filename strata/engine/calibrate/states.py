"""The hidden states of all tokens between two layers: files, so that memory holds a window of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

_HASH_ROWS = 4096


class States:
    """f32 `[tokens, hidden]` in a file, mapped.

    Its blocks are reserved when it is opened: on a full disk a mapping would kill the process, not raise.
    """

    def __init__(self, path: Path, tokens: int, hidden: int) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, tokens * hidden * 4)
            os.posix_fallocate(descriptor, 0, tokens * hidden * 4)
        finally:
            os.close(descriptor)
        self._mapped = np.memmap(path, np.float32, "r+", shape=(tokens, hidden))
        self.rows: NDArray[np.float32] = np.asarray(self._mapped)

    def sync(self) -> str:
        """Onto the disk; returns the checksum of all of it."""
        self._mapped.flush()
        return self.checksum()

    def checksum(self) -> str:
        """xxh3-64, hexadecimal."""
        hasher = xxhash.xxh3_64()
        for start in range(0, len(self.rows), _HASH_ROWS):
            hasher.update(self.rows[start : start + _HASH_ROWS].data)
        return hasher.hexdigest()


def states_bytes(tokens: int, hidden: int) -> int:
    """What a run takes beside its statistics: a layer's input, its output, and what its experts read."""
    return 3 * tokens * hidden * 4
