"""Writes a STATS file member by member, in any order; a layer counts once it is synced and journalled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.errors import WeightValueError
from strata.store.calibration import CHECKSUM_BYTES, VECTORS, StatsInfo, checksums, stats_layout, triangle_of

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MemberStats:
    """What was found of one member (see `calibration`). vectors: f32 `[4, cols]` in the order of VECTORS;
    moments: f32 `[cols, cols]`, symmetric, or None."""

    tokens: int
    vectors: Floats
    moments: Floats | None


class StatsWriter:
    """The unfinished file `path`. Members that earlier runs wrote stay."""

    def __init__(self, path: Path, info: StatsInfo) -> None:
        self.path = path
        self._info = info
        layout = stats_layout(info)
        self._entries = {entry.name: entry for entry in layout.entries}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, layout.nbytes)
        self._put(layout.header, 0)

    def write(self, name: str, member: int, stats: MemberStats) -> None:
        """One member of the input `name`. Raises WeightValueError for NaN and Inf."""
        parts = [stats.vectors] if stats.moments is None else [stats.vectors, stats.moments]
        if not all(bool(np.isfinite(part).all()) for part in parts):
            raise WeightValueError(
                f"{name}, member {member}: NaN or Inf in what its matrix reads",
                remedy="`strata verify` the store, or get an undamaged checkpoint",
            )
        triangle = triangle_of(stats.moments) if self._info.moments and stats.moments is not None else None
        self._row(f"{name}.tokens", member, 8, np.int64(stats.tokens).tobytes())
        for vector, values in zip(VECTORS, stats.vectors, strict=True):
            self._row(f"{name}.{vector}", member, values.nbytes, values.tobytes())
        if triangle is not None:
            self._row(f"{name}.moments", member, triangle.nbytes, triangle.data.cast("B"))
        checks = checksums(stats.tokens, stats.vectors, triangle)
        self._row(f"{name}.xxh3", member, CHECKSUM_BYTES, checks)

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        os.fsync(self._file)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)

    def _row(self, name: str, member: int, stride: int, data: bytes | memoryview) -> None:
        self._put(data, self._entries[name].offset + member * stride)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written
