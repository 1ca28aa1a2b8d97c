"""Matrices put together from others: blocks below each other, gate and up rows interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError
from strata.store.formats import padded
from strata.store.pack import Codes
from strata.store.rows import BlockRows, Floats, Rows, ValueGuard
from strata.store.scaled_rows import NONE, Scaling, scaled
from strata.store.source import CheckpointSource, SourceRows, TargetTensor


class StackedRows:
    """Blocks below each other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        widths = sorted({part.cols for part in parts})
        if len(widths) != 1:
            raise FileFormatError(f"blocks of {widths} columns cannot be stacked")
        self._parts = parts
        self._starts = np.cumsum([0, *(part.count for part in parts)]).tolist()

    @property
    def count(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    @property
    def cols(self) -> int:
        """Columns."""
        return self._parts[0].cols

    def floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop)."""
        found = [part.floats(lo, hi) for part, lo, hi in self._cut(start, stop)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def kept(self, start: int, stop: int) -> Codes:
        """Rows [start, stop); every part keeps the same format."""
        found = [part.kept(lo, hi) for part, lo, hi in self._cut(start, stop)]
        return found[0] if len(found) == 1 else map_codes(lambda arrays, _: np.concatenate(arrays), found, 0)

    def _cut(self, start: int, stop: int) -> list[tuple[Rows, int, int]]:
        found = []
        for part, first, last in zip(self._parts, self._starts, self._starts[1:], strict=False):
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append((part, low - first, high - first))
        return found


class InterleavedRows:
    """Rows [first, first + width) of gate and up in alternating blocks of 8, completed by zero rows.

    Runs start and stop at multiples of 16.
    """

    def __init__(self, gate: Rows, up: Rows, first: int, width: int, zero_code: int) -> None:
        if (gate.count, gate.cols) != (up.count, up.cols):
            raise FileFormatError(
                f"gate is [{gate.count}, {gate.cols}] but up is [{up.count}, {up.cols}]",
                remedy="the configuration does not fit these weights",
            )
        self._gate, self._up = gate, up
        self._first, self._width = first, width
        self._zero_code = zero_code

    @property
    def count(self) -> int:
        """Rows."""
        return 2 * padded(self._width, 8)

    @property
    def cols(self) -> int:
        """Columns."""
        return self._gate.cols

    def floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) of the interleaved matrix."""
        low, high = self._half(start, stop)
        return interleave((self._gate.floats(low, high), self._up.floats(low, high)), 0)

    def kept(self, start: int, stop: int) -> Codes:
        """The same with the source's quantization."""
        low, high = self._half(start, stop)
        return map_codes(interleave, (self._gate.kept(low, high), self._up.kept(low, high)), self._zero_code)

    def _half(self, start: int, stop: int) -> tuple[int, int]:
        return self._first + start // 2, self._first + min(stop // 2, self._width)


def interleave(parts: Sequence[NDArray[Any]], fill: int) -> NDArray[Any]:
    """Two arrays `[n, cols]` -> `[2 * padded(n, 8), cols]`: 8 rows of each in turn, then `fill`."""
    count, cols = parts[0].shape
    blocks = padded(count, 8) // 8
    out = np.full((2, blocks * 8, cols), fill, parts[0].dtype)
    out[0, :count], out[1, :count] = parts
    return np.ascontiguousarray(out.reshape(2, blocks, 8, cols).swapaxes(0, 1)).reshape(-1, cols)


def map_codes(
    join: Callable[[Sequence[NDArray[Any]], int], NDArray[Any]], parts: Sequence[Codes], zero_code: int
) -> Codes:
    """Join the values (missing ones are the zero code) and likewise the scales and minimums (0)."""
    scales = [part.scales for part in parts if part.scales is not None]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Codes(
        join([part.values for part in parts], zero_code),
        join(scales, 0) if scales else None,
        join(minimums, 0) if minimums else None,
    )


def stacked(source: CheckpointSource, blocks: tuple[SourceRows, ...], guard: ValueGuard) -> Rows:
    """The blocks of one target below each other."""
    parts = [BlockRows(source, block, guard) for block in blocks]
    return parts[0] if len(parts) == 1 else StackedRows(parts)


def target_rows(
    source: CheckpointSource,
    target: TargetTensor,
    guard: ValueGuard,
    zero_code: int,
    scaling: Scaling = NONE,
) -> Rows:
    """The rows of a packed shared tensor times its factors."""
    if not target.interleave:
        return scaled(stacked(source, target.sources, guard), scaling)
    gate, up = (BlockRows(source, block, guard) for block in target.sources)
    parts = scaled(gate, scaling.columns_only), scaled(up, scaling)
    return InterleavedRows(*parts, 0, gate.count, zero_code)
