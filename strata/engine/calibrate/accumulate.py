"""Statistics of a matrix's input, added up from one chunk of rows after the other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from strata.store.calibration_writer import MemberStats

Floats = NDArray[np.float32]

_ABOVE = 1000
"""One value in so many may be above the 99.9th percentile."""
_WIDE = 1024


class Accumulator:
    """Of one input. rows: how many there will be in all: it decides how many of the largest values are kept.

    Memory: `(rows / 1000 + 3) * cols + cols^2` numbers, without moments `(rows / 1000 + 3) * cols`.
    """

    def __init__(self, cols: int, rows: int, moments: bool) -> None:
        self.rows = 0
        self._largest = LargestValues(cols, rows // _ABOVE + 1)
        self._sizes = np.zeros(cols)
        self._squares = np.zeros(cols)
        self._moments = np.zeros((cols, cols), np.float32) if moments else None

    def add(self, x: Floats) -> None:
        """Rows f32 `[n, cols]`."""
        sizes = np.abs(x)
        self.rows += len(x)
        self._sizes += sizes.sum(axis=0, dtype=np.float64)
        self._squares += np.einsum("rc,rc->c", x, x)
        self._largest.add(sizes)
        if self._moments is not None:
            self._moments += _products(x)

    def result(self) -> MemberStats:
        """The statistics of everything added; of no rows they are zero."""
        count = max(1, self.rows)
        top = self._largest.values
        p999 = top.min(axis=0) if len(top) else np.zeros(len(self._sizes), np.float32)
        absmax = top.max(axis=0) if len(top) else p999
        vectors = np.stack([absmax, p999, self._sizes / count, self._squares / count]).astype(np.float32)
        moments = None if self._moments is None else self._moments / np.float32(count)
        return MemberStats(self.rows, vectors, moments)


def _products(x: Floats) -> Floats:
    """x^T x. numpy's is a symmetric rank-k update, half of the work, but on all processors at once: with few
    columns its threads wait for each other longer than they compute (14 ms at 256 columns, busy machine)."""
    if x.shape[1] >= _WIDE:
        wide: Floats = x.T @ x
        return wide
    narrow = torch.from_numpy(x)
    result: Floats = (narrow.T @ narrow).numpy()
    return result


class LargestValues:
    """The `count` largest values of every column, exactly.

    Of n rows the (n // 1000 + 1)th largest is the least value that 99.9 % of them do not exceed.
    """

    def __init__(self, cols: int, count: int) -> None:
        self.values = np.empty((0, cols), np.float32)
        self._count = count

    def add(self, x: Floats) -> None:
        """Rows f32 `[n, cols]`; most of them are soon below what is kept already."""
        if len(self.values) == self._count:
            x = _packed(x, x > self.values.min(axis=0))
        joined = np.concatenate([self.values, x])
        surplus = len(joined) - self._count
        self.values = np.partition(joined, surplus, axis=0)[surplus:] if surplus > 0 else joined


def _packed(x: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """The chosen values of every column at its top, then -1; few rows where few are chosen."""
    where = np.flatnonzero(chosen)
    columns = where % x.shape[1]
    order = np.argsort(columns, kind="stable")
    columns = columns[order]
    counts = np.bincount(columns, minlength=x.shape[1])
    rank = np.arange(len(columns)) - (np.cumsum(counts) - counts)[columns]
    packed = np.full((int(counts.max(initial=0)), x.shape[1]), -1, np.float32)
    packed[rank, columns] = x.ravel()[where[order]]
    return packed
