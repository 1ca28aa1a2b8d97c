"""Scales for groups whose columns do not cost the same: the search of `quantize`, weighted.

`quantize` clips nothing by more than half a step, because it knows nothing about inputs. Here the cost of an
error is known, so that a scale may clip where that is cheaper. Arrays are `[columns, rows]`: a row of the
matrix has one scale in a group, and rows are what numpy works along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import WeightFormat
from strata.store.pack import Codes, scale_dtype

Floats = NDArray[np.float32]

_STRETCH = tuple(float(x) for x in np.linspace(0.62, 1.06, 12))  # over the least scale that clips nothing
_CUT = (0.0, 0.05, 0.1, 0.16)  # of a range with a minimum, at either end
_CHUNK_VALUES = 1 << 16  # 256 KiB of f32: the passes of a search stay inside L2
_LARGEST = {2: 65504.0, 4: float(np.finfo(np.float32).max) / 128}  # the largest value must be finite too
_SMALLEST = {2: 2.0**-24, 4: float(np.finfo(np.float32).tiny)}


@dataclass(frozen=True)
class Grid:
    """The values that codes stand for: scale * n + minimum for n of low to high; arrays f32 `[rows]`."""

    scale: Floats
    inverse: Floats
    minimum: Floats | None
    low: int
    high: int

    def numbers(self, values: Floats) -> NDArray[np.int8]:
        """The nearest n of values `[..., rows]`."""
        scaled = (values if self.minimum is None else values - self.minimum) * self.inverse
        np.rint(scaled, out=scaled)
        return np.clip(scaled, self.low, self.high, out=scaled).astype(np.int8)

    def values(self, numbers: NDArray[np.int8]) -> Floats:
        """What they mean, rounded as `dequantize` does."""
        found = numbers * self.scale
        return found if self.minimum is None else found + self.minimum


@dataclass(frozen=True)
class Scales:
    """Scales and minimums `[rows]` in the format's own type."""

    scales: NDArray[Any]
    minimums: NDArray[Any] | None = None

    def grid(self, fmt: WeightFormat) -> Grid:
        """As numbers to compute with."""
        scale = self.scales.astype(np.float32)
        minimum = None if self.minimums is None else self.minimums.astype(np.float32)
        return Grid(scale, _inverse(scale), minimum, *_limits(fmt))


def search_scales(values: Floats, fmt: WeightFormat, costs: Floats) -> Scales:
    """The cheapest scales found for `values` `[columns, rows]`; `costs` `[columns]` of a squared error."""
    weights = costs / np.float32(costs.mean()) if costs.any() else np.ones_like(costs)
    search = _with_minimum if fmt.minimum else _symmetric
    step = max(1, _CHUNK_VALUES // len(values))
    parts = [
        search(np.ascontiguousarray(values[:, start : start + step]), fmt, weights)
        for start in range(0, values.shape[1], step)
    ]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    scales = np.concatenate([part.scales for part in parts])
    return Scales(scales, np.concatenate(minimums) if minimums else None)


def _limits(fmt: WeightFormat) -> tuple[int, int]:
    if fmt.values == "int8":
        return -127, 127
    return (0, 15) if fmt.minimum else (-8, 7)


def _inverse(scales: Floats) -> Floats:
    return np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)


def _symmetric(x: Floats, fmt: WeightFormat, costs: Floats) -> Scales:
    """The sign that gives the longer end the longer side, then the best of some stretches."""
    low, high = _limits(fmt)
    top, bottom = np.maximum(x.max(axis=0), 0), np.maximum(-x.min(axis=0), 0)
    above, below = np.float32(high + 0.5), np.float32(-low + 0.5)
    positive, negative = np.maximum(top / above, bottom / below), np.maximum(bottom / above, top / below)
    sign = np.where(positive <= negative, np.float32(1), np.float32(-1))
    least = np.minimum(positive, negative) * sign
    best, best_gain = least, np.full(len(least), -1, np.float32)
    for stretch in _STRETCH:
        scale, gain = _refit(x, least * np.float32(stretch), low, high, costs)
        better = gain > best_gain
        best, best_gain = np.where(better, scale, best), np.where(better, gain, best_gain)
    return Scales(_stored(best, fmt))


def _refit(x: Floats, scale: Floats, low: int, high: int, costs: Floats) -> tuple[Floats, Floats]:
    """The scale of least cost for the codes that `scale` gives, and what it takes off the cost of zeros."""
    q = x * _inverse(scale)
    np.rint(q, out=q)
    np.clip(q, low, high, out=q)
    weighted = q * costs[:, None]
    xq, qq = np.einsum("kr,kr->r", weighted, x), np.einsum("kr,kr->r", weighted, q)
    found = np.divide(xq, qq, out=np.zeros_like(xq), where=qq > 0)
    return found, found * xq


def _stored(scales: Floats, fmt: WeightFormat) -> NDArray[Any]:
    """Rounded to the format's type; neither infinite nor, where there is something to scale, zero."""
    size = np.clip(
        np.abs(scales), np.float32(_SMALLEST[fmt.scale_bytes]), np.float32(_LARGEST[fmt.scale_bytes])
    )
    found: NDArray[Any] = np.where(scales != 0, np.copysign(size, scales), 0).astype(scale_dtype(fmt))
    return found


def _with_minimum(x: Floats, fmt: WeightFormat, costs: Floats) -> Scales:
    """Ranges cut at either end, each refitted with its own scale and minimum."""
    low, high = x.min(axis=0), x.max(axis=0)
    width = high - low
    best = Scales(np.zeros(0))
    best_error = np.full(len(low), np.inf, np.float32)
    for left in _CUT:
        for right in _CUT:
            step = width * np.float32((1 - left - right) / 15)
            found = _refit_both(x, step, low + np.float32(left) * width, fmt, costs)
            best, best_error = _better(best, best_error, found, _cost(x, found.grid(fmt), costs))
    return best


def _better(old: Scales, old_error: Floats, new: Scales, error: Floats) -> tuple[Scales, Floats]:
    """The cheaper of two, row by row."""
    if not len(old.scales):
        return new, error
    assert old.minimums is not None and new.minimums is not None
    better = error < old_error
    chosen = Scales(np.where(better, new.scales, old.scales), np.where(better, new.minimums, old.minimums))
    return chosen, np.where(better, error, old_error)


def _cost(x: Floats, grid: Grid, costs: Floats) -> Floats:
    error = x - grid.values(grid.numbers(x))
    found: Floats = np.einsum("kr,kr,k->r", error, error, costs)
    return found


def _refit_both(x: Floats, scale: Floats, minimum: Floats, fmt: WeightFormat, costs: Floats) -> Scales:
    """Scale and minimum of least cost for the codes that `scale` and `minimum` give."""
    q = np.clip(np.rint((x - minimum) * _inverse(scale)), 0, 15)
    total = costs.sum()
    mean_q, mean_x = costs @ q / total, costs @ x / total
    q_off = q - mean_q
    spread = np.einsum("kr,kr,k->r", q_off, q_off, costs)
    common = np.einsum("kr,kr,k->r", q_off, x, costs)
    found = np.divide(common, spread, out=scale.copy(), where=spread > 0)
    minimums = np.clip(mean_x - found * mean_q, -_LARGEST[2], _LARGEST[2])
    return Scales(_stored(found, fmt), minimums.astype(scale_dtype(fmt)))


def nearest(values: Floats, fmt: WeightFormat, costs: Floats) -> Codes:
    """Codes of finite f32 `[rows, cols]`: searched scales, nearest values; costs `[cols]` of errors."""
    cols = values.shape[1]
    width = fmt.group or cols
    runs = [(start, min(start + width, cols)) for start in range(0, cols, width)]
    found = [_nearest_group(values[:, a:b], fmt, costs[a:b]) for a, b in runs]
    numbers = np.concatenate([part for part, _ in found], axis=1)
    minimums = [scales.minimums for _, scales in found if scales.minimums is not None]
    return Codes(
        coded(numbers, fmt),
        np.stack([scales.scales for _, scales in found], axis=1),
        np.stack(minimums, axis=1) if minimums else None,
    )


def _nearest_group(values: Floats, fmt: WeightFormat, costs: Floats) -> tuple[NDArray[np.int8], Scales]:
    columns = np.ascontiguousarray(values.T)
    found = search_scales(columns, fmt, costs)
    return found.grid(fmt).numbers(columns).T, found


def coded(numbers: NDArray[np.int8], fmt: WeightFormat) -> NDArray[np.uint8]:
    """The numbers that scales multiply -> what is stored."""
    if fmt.values == "int4" and not fmt.minimum:
        numbers = numbers + np.int8(8)
    return np.ascontiguousarray(numbers).view(np.uint8)
