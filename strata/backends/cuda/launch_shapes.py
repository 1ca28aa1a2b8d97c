"""Grids, blocks and shared memory of every kernel: what a launch needs beside its arguments."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MAX_SHARED = 99 << 10
"""Bytes of shared memory that one block may ask for on sm_86."""


@dataclass(frozen=True)
class LaunchShape:
    """file: the `.cu` file; entry: the kernel in it; block: threads."""

    file: str
    entry: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int


def rms_norm(rows: int, columns: int) -> LaunchShape:
    """One block per row; columns a multiple of 4."""
    block = min(256, max(WARP, columns // 4 // WARP * WARP))
    return LaunchShape("norm", "rms_norm", (rows, 1, 1), block, columns * 4 + block // WARP * 4)
