"""The roundings that methods stand for: made when the first rows come, from statistics read then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import WeightFormat
from strata.store.gptq import gptq, has_integers
from strata.store.group_scales import nearest
from strata.store.inputs import Inputs
from strata.store.methods import METHODS
from strata.store.moments import DAMPING, feedback
from strata.store.pack import Codes
from strata.store.quantize import check_range, quantize
from strata.store.treatment import Rounding

Floats = NDArray[np.float32]
_FACTORING = threading.Lock()  # one factorization at a time: it takes 40 bytes per element of the moments


def rounding(method: str, fmt: WeightFormat, inputs: Callable[[], Inputs], act_order: bool) -> Rounding:
    """How a method rounds a matrix of one format; `inputs` is called at most once, when it is needed."""
    kind = METHODS[method].rounding
    if kind == "plain" or not has_integers(fmt):
        return quantize
    return Lazily(lambda: _gptq(fmt, inputs(), act_order) if kind == "gptq" else _nearest(inputs()))


class Lazily:
    """A rounding that is made when the first rows come, by whichever thread has them."""

    def __init__(self, make: Callable[[], Rounding]) -> None:
        self._make = make
        self._made: Rounding | None = None
        self._lock = threading.Lock()

    def __call__(self, values: Floats, fmt: WeightFormat, name: str, first_row: int, /) -> Codes:
        """As the rounding does."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return self._made(values, fmt, name, first_row)


class ByRows:
    """A rounding of a matrix whose rows have different inputs: each part's up to its end, exclusive."""

    def __init__(self, ends: Sequence[int], parts: Sequence[Rounding]) -> None:
        self._ends, self._parts = ends, parts

    def __call__(self, values: Floats, fmt: WeightFormat, name: str, first_row: int, /) -> Codes:
        """Part by part."""
        found: list[Codes] = []
        start, stop = first_row, first_row + len(values)
        for end, part in zip(self._ends, self._parts, strict=True):
            if start < min(stop, end):
                rows = values[start - first_row : min(stop, end) - first_row]
                found.append(part(rows, fmt, name, start))
                start = min(stop, end)
        return _below(found)


def _below(parts: list[Codes]) -> Codes:
    scales = [part.scales for part in parts if part.scales is not None]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Codes(
        np.concatenate([part.values for part in parts]),
        np.concatenate(scales) if scales else None,
        np.concatenate(minimums) if minimums else None,
    )


def _gptq(fmt: WeightFormat, inputs: Inputs, act_order: bool) -> Rounding:
    assert inputs.moments is not None, "with_stats lets no gptq begin without them"
    with _FACTORING:
        plan = feedback(inputs.moments, fmt.group, act_order, inputs.name)
    return lambda values, fmt, name, first_row: gptq(values, fmt, plan, name, first_row)


def _nearest(inputs: Inputs) -> Rounding:
    costs = inputs.mean_square + np.float32(DAMPING) * inputs.mean_square.mean()

    def rounded(values: Floats, fmt: WeightFormat, name: str, first_row: int, /) -> Codes:
        check_range(values, fmt, name, first_row)
        return nearest(values, fmt, costs)

    return rounded
