"""Rounding that makes good later what it did wrong earlier (GPTQ): f32 rows and second moments -> codes.

The loop over columns is Python; rows are the vector. The work is rows x cols^2 / 2 multiplications in matrix
products, one per group, and as much again inside groups for groups as wide as the matrix (w8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import WeightFormat
from strata.store.group_scales import Scales, coded, search_scales
from strata.store.moments import Feedback
from strata.store.pack import Codes, scale_dtype
from strata.store.quantize import check_range

Floats = NDArray[np.float32]

_RUN = 128  # columns between matrix products, where a group is wider


def has_integers(fmt: WeightFormat) -> bool:
    """Whether codes of `fmt` are integers with a scale."""
    return fmt.values in ("int4", "int8")


def gptq(values: Floats, fmt: WeightFormat, plan: Feedback, name: str, first_row: int = 0) -> Codes:
    """Quantize finite f32 `[rows, cols]`, like `quantize`, for inputs whose `feedback` is `plan`.

    Rows do not depend on each other: runs of rows give what the whole matrix would.
    """
    check_range(values, fmt, name, first_row)
    work = _Work.begin(values, fmt, plan)
    for start, stop in plan.runs:
        _round_group(work, start, stop)
    return work.codes()


@dataclass
class _Work:
    """Everything `[cols, rows]`, columns in the order of the plan, so that a column is contiguous."""

    format: WeightFormat
    plan: Feedback
    weights: Floats
    errors: Floats
    numbers: NDArray[np.int8]
    scales: NDArray[Any]
    minimums: NDArray[Any] | None

    @classmethod
    def begin(cls, values: Floats, fmt: WeightFormat, plan: Feedback) -> _Work:
        weights = np.ascontiguousarray(values.T[plan.order])
        kind, shape = scale_dtype(fmt), (len(plan.runs), values.shape[0])
        minimums = np.zeros(shape, kind) if fmt.minimum else None
        return cls(
            fmt,
            plan,
            weights,
            np.zeros_like(weights),
            np.zeros(weights.shape, np.int8),
            np.zeros(shape, kind),
            minimums,
        )

    def target(self, start: int, stop: int) -> Floats:
        """Columns start:stop with what the errors before them ask for."""
        found: Floats = self.weights[start:stop] + self.plan.upper[:start, start:stop].T @ self.errors[:start]
        return found

    def codes(self) -> Codes:
        """In the order of the file."""
        values = np.empty(self.numbers.shape[::-1], np.int8)
        values[:, self.plan.order] = self.numbers.T
        minimums = None if self.minimums is None else np.ascontiguousarray(self.minimums.T)
        return Codes(coded(values, self.format), np.ascontiguousarray(self.scales.T), minimums)


def _round_group(work: _Work, start: int, stop: int) -> None:
    """Choose the scales of the columns that share them, then round one after another."""
    width = work.format.group or work.weights.shape[0]
    index = int(work.plan.order[start]) // width
    whole = work.weights[start:stop] if start == 0 else work.target(start, stop)
    found = search_scales(whole, work.format, work.plan.costs[start:stop])
    work.scales[index] = found.scales
    if work.minimums is not None:
        work.minimums[index] = found.minimums
    for first in range(start, stop, _RUN):
        last = min(first + _RUN, stop)
        _round_run(
            work, first, last, whole if (first, last) == (start, stop) else work.target(first, last), found
        )


def _round_run(work: _Work, start: int, stop: int, target: Floats, found: Scales) -> None:
    grid = found.grid(work.format)
    for i in range(start, stop):
        wanted = target[i - start]
        if i > start:
            wanted = wanted + work.plan.upper[start:i, i] @ work.errors[start:i]
        numbers = grid.numbers(wanted)
        work.numbers[i] = numbers
        np.subtract(work.weights[i], grid.values(numbers), out=work.errors[i])
