"""Target rows out of source tensors: strides, column cuts, transposition, row order.

Everything hands out runs of rows, so that a matrix of any size passes through in pieces of a few MB.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError, WeightValueError
from strata.store.formats import FORMATS
from strata.store.pack import E8M0_TOP, Codes
from strata.store.quantize import check_finite
from strata.store.source import CheckpointSource, QuantizedRows, SourceRows

Floats = NDArray[np.float32]
_COUNT_ROWS = 256


class Rows(Protocol):
    """A matrix `[count, cols]` that is read in runs of rows."""

    @property
    def count(self) -> int:
        """Rows."""
        ...

    @property
    def cols(self) -> int:
        """Columns."""
        ...

    def floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) dequantized, finite."""
        ...

    def kept(self, start: int, stop: int) -> Codes:
        """Rows [start, stop) with the source's own quantization; only where `format_kept` named one."""
        ...


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A source tensor seen as 2-D: leading dimensions are rows, 1-D tensors one row."""
    if len(shape) < 2:
        return 1, int(np.prod(shape))
    return int(np.prod(shape[:-1])), shape[-1]


def format_kept(
    source: CheckpointSource, block: SourceRows, known: dict[str, QuantizedRows | None]
) -> str | None:
    """The WeightFormat in which this block can be copied as it is, or None.

    `known` remembers one probe row per source dtype: what a dtype can be kept as never varies by tensor.
    """
    info = source.tensors[block.name]
    rows, cols = matrix_shape(info.shape)
    if (
        block.transposed
        or block.col_stride != 1
        or block.col_start != 0
        or block.col_stop not in (None, cols)
    ):
        return None
    if info.dtype not in known:
        known[info.dtype] = source.quantized(block.name, 0, 1) if rows else None
    probe = known[info.dtype]
    return probe.format if probe is not None else None


class ValueGuard:
    """Refuses NaN and Inf, or counts those that `allow_nan` turned into 0 (tensor name -> count)."""

    def __init__(self, allow_nan: bool) -> None:
        self.allow_nan = allow_nan
        self.replaced: dict[str, int] = {}
        self._lock = threading.Lock()

    def check(self, values: Floats, name: str, first_row: int) -> None:
        """Look at rows of `values`, in place; raises WeightValueError when not allowed."""
        count = check_finite(values, name, first_row, self.allow_nan)
        if count == 0:
            return
        with self._lock:  # pieces of one tensor are made by several threads
            self.replaced[name] = self.replaced.get(name, 0) + count


class BlockRows:
    """The rows of one SourceRows."""

    def __init__(self, source: CheckpointSource, block: SourceRows, guard: ValueGuard) -> None:
        if block.name not in source.tensors:
            raise FileFormatError(
                f"{source.path}: the model needs tensor {block.name}, the checkpoint has none of that name",
                remedy="incomplete download? compare the files with the repository's list",
            )
        rows, cols = matrix_shape(source.tensors[block.name].shape)
        self._source, self._guard = source, guard
        self._block = dataclasses.replace(
            block,
            stop=rows if block.stop is None else block.stop,
            col_stop=cols if block.col_stop is None else block.col_stop,
        )
        self._row_range = range(block.start, self._block.stop or 0, block.stride)
        self._col_range = range(block.col_start, self._block.col_stop or 0, block.col_stride)
        self._check_inside(rows, cols)
        self._transposed: Floats | None = None
        self._lock = threading.Lock()

    def _check_inside(self, rows: int, cols: int) -> None:
        ends = ((self._row_range, rows, "row"), (self._col_range, cols, "column"))
        for taken, available, what in ends:
            if not taken or taken[0] < 0 or taken[-1] >= available:
                raise FileFormatError(
                    f"{self._source.path}: {self._block.name} has {available} {what}s, "
                    f"the model needs {what}s {taken.start} to {taken.stop}",
                    remedy="the configuration does not fit these weights: wrong or damaged config.json?",
                )

    @property
    def count(self) -> int:
        """Rows."""
        return len(self._col_range if self._block.transposed else self._row_range)

    @property
    def cols(self) -> int:
        """Columns."""
        return len(self._row_range if self._block.transposed else self._col_range)

    def floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop), finite."""
        if self._block.transposed:
            return self._pick(start, stop, lambda lo, hi: self._whole()[lo:hi])
        return self._pick(start, stop, self._read)

    def kept(self, start: int, stop: int) -> Codes:
        """Rows [start, stop) as the source has them."""
        quantized = self._quantized(*self._span(start, stop))
        self._check_scales(quantized)
        return Codes(quantized.codes, quantized.scales, quantized.minimums)

    def _span(self, start: int, stop: int) -> tuple[int, int, NDArray[Any] | None]:
        """The run of block rows that holds target rows [start, stop), and their order inside it."""
        if self._block.row_order is None:
            return start, stop, None
        order = np.asarray(self._block.row_order[start:stop])
        low = int(order.min())
        return low, int(order.max()) + 1, order - low

    def _pick(self, start: int, stop: int, read: Callable[[int, int], Floats]) -> Floats:
        low, high, order = self._span(start, stop)
        values = read(low, high)
        return values if order is None else values[order]

    def _read(self, start: int, stop: int) -> Floats:
        """Block rows [start, stop), before any row order."""
        taken = self._row_range[start:stop]
        values = self._source.rows(self._block.name, taken[0], taken[-1] + 1)
        cols = slice(self._col_range.start, self._col_range.stop, self._col_range.step)
        values = np.ascontiguousarray(values[:: self._block.stride, cols], np.float32)
        return self._guarded(values, taken[0])

    def _guarded(self, values: Floats, first_row: int) -> Floats:
        if not values.flags.writeable and self._guard.allow_nan:
            values = values.copy()
        try:
            self._guard.check(values, self._block.name, first_row)
        except WeightValueError as error:
            raise self._with_count(error) from None
        return values

    def _with_count(self, error: WeightValueError) -> WeightValueError:
        """The same error with the number of bad values of the whole tensor (read once more, in pieces)."""
        rows, _ = matrix_shape(self._source.tensors[self._block.name].shape)
        count = 0
        for start in range(0, rows, _COUNT_ROWS):
            values = self._source.rows(self._block.name, start, min(start + _COUNT_ROWS, rows))
            count += int((~np.isfinite(values)).sum())
        return WeightValueError(f"{error.cause}, {count} in the whole tensor", remedy=error.remedy)

    def _whole(self) -> Floats:
        """A transposed block, read once: its target rows are columns of the file."""
        with self._lock:
            if self._transposed is None:
                self._transposed = np.ascontiguousarray(self._read(0, len(self._row_range)).T)
            return self._transposed

    def _quantized(self, start: int, stop: int, order: NDArray[Any] | None) -> QuantizedRows:
        taken = self._row_range[start:stop]
        found = self._source.quantized(self._block.name, taken[0], taken[-1] + 1)
        if found is None:
            raise FileFormatError(f"{self._block.name}: rows {start} to {stop} cannot be kept as they are")

        def pick(array: NDArray[Any]) -> NDArray[Any]:
            array = array[:: self._block.stride]
            return array if order is None else array[order]

        minimums = None if found.minimums is None else pick(found.minimums)
        return dataclasses.replace(
            found, codes=pick(found.codes), scales=pick(found.scales), minimums=minimums
        )

    def _check_scales(self, rows: QuantizedRows) -> None:
        """Kept scales must be finite like any other weight, and so must 6 * scale of mxfp4."""
        for scales in (rows.scales, rows.minimums):
            if scales is None:
                continue
            bad = scales > E8M0_TOP if FORMATS[rows.format].scale_bytes == 1 else ~np.isfinite(scales)
            if bad.any():
                raise WeightValueError(
                    f"{self._block.name}: {int(bad.sum())} scales of its {rows.format} blocks are NaN or Inf",
                    remedy="get an undamaged checkpoint",
                )
