"""Percentile clipping of w8: a row's scale comes from a percentile of its weights instead of the largest.

The few weights beyond it are cut off, and all others get finer steps. A margin over the percentile keeps
what lies just above it. Whether it pays is a question of the model: docs/quantization.md has the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from strata.errors import UsageError
from strata.store.formats import WeightFormat
from strata.store.pack import Codes
from strata.store.quantize import check_range, per_row_int8
from strata.store.treatment import ExpertTreatment, Rounding

Floats = NDArray[np.float32]
MARGIN = np.float32(1.1)
LEAST = 90.0
_Target = TypeVar("_Target")


def check_clip(percent: float | None) -> None:
    """UsageError for what is no percentile to clip at."""
    if percent is not None and not LEAST <= percent < 100:
        raise UsageError(
            f"clip is {percent:g}", remedy=f"use a percentile of {LEAST:g} to less than 100, e.g. 99.9"
        )


def is_w8(fmt: WeightFormat) -> bool:
    """Whether a format has one scale for a row of int8: the only ones that are clipped."""
    return fmt.values == "int8" and not fmt.group


def largest_kept(values: Floats, percent: float) -> Floats:
    """What the 127th step of each row stands for: f32 `[rows, cols]` -> `[rows]`."""
    size = np.abs(values)
    kept = np.percentile(size, percent, axis=1).astype(np.float32) * MARGIN
    # A row that is nearly all zeros has a percentile of 0: nothing of it is cut off.
    most: Floats = size.max(axis=1)
    return np.where(kept > 0, np.minimum(kept, most), most)


def clipped(percent: float, otherwise: Rounding) -> Rounding:
    """Rows in w8 rounded and cut off; other formats as `otherwise` does."""

    def rounded(values: Floats, fmt: WeightFormat, name: str, first_row: int, /) -> Codes:
        if not is_w8(fmt) or not values.size:
            return otherwise(values, fmt, name, first_row)
        check_range(values, fmt, name, first_row)
        return per_row_int8(values, largest_kept(values, percent))

    return rounded


def clipped_expert(
    percent: float, treat: Callable[[_Target], ExpertTreatment]
) -> Callable[[_Target], ExpertTreatment]:
    """The treatment of experts with both of their roundings clipped."""

    def treated(target: _Target) -> ExpertTreatment:
        how = treat(target)
        return dataclasses.replace(
            how,
            gate_up_rounding=clipped(percent, how.gate_up_rounding),
            down_rounding=clipped(percent, how.down_rounding),
        )

    return treated
