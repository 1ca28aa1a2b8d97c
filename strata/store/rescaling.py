"""Factors of input channels that make a matrix easier to round: AWQ's and SmoothQuant's, by a grid.

x is divided and W's columns are multiplied by s (`folding` says where that is exact).

- AWQ (Lin et al. 2023): s = (mean |x|)^alpha: columns that meet large inputs are rounded more finely.
- SmoothQuant (Xiao et al. 2022): s = (large |x|)^alpha / (largest |w|)^(1 - alpha), for inputs that are
  rounded to 8 bits token by token, where one large channel makes the steps of all others coarse. "Large" is
  the 99.9th percentile: the few values beyond it are no reason to squeeze the rest.

alpha is the one of the least mean square error of the output over `ALPHAS`; no factors at all are always
among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import WeightFormat
from strata.store.group_scales import nearest
from strata.store.inputs import Inputs
from strata.store.methods import Kind
from strata.store.pack import dequantize

Floats = NDArray[np.float32]

ALPHAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
_LARGEST = np.float32(2.0**10)  # factors beyond this would only move the trouble to the other side


@dataclass(frozen=True)
class Sample:
    """Rows of a matrix that reads the inputs: f32 `[rows, cols]` and their future format."""

    values: Floats
    format: WeightFormat


def best_factors(
    kind: Kind,
    inputs: Inputs,
    samples: Sequence[Sample],
    alpha: float | None = None,
    shared: Callable[[Floats], Floats] = lambda found: found,
) -> Floats | None:
    """Factors s, f32 `[cols]`, or None where rounding as it is costs least.

    alpha: this one, without a search. shared: makes factors equal where they must be.
    """
    if alpha is not None:
        return shared(factors(kind, inputs, samples, alpha))
    candidates = [shared(factors(kind, inputs, samples, a)) for a in ALPHAS]
    costs = [output_error(kind, inputs, samples, found) for found in (None, *candidates)]
    return (None, *candidates)[int(np.argmin(costs))]


def factors(kind: Kind, inputs: Inputs, samples: Sequence[Sample], alpha: float) -> Floats:
    """s of one alpha, with a geometric mean of 1; 1 where an input was always 0."""
    if kind == "awq":
        raw, known = inputs.mean_abs.astype(np.float64), inputs.mean_abs > 0
        logs = alpha * np.log(raw, out=np.zeros_like(raw), where=known)
    else:
        top = np.max([np.abs(sample.values).max(axis=0) for sample in samples], axis=0).astype(np.float64)
        raw, known = inputs.p999.astype(np.float64), (inputs.p999 > 0) & (top > 0)
        logs = alpha * np.log(raw, out=np.zeros_like(raw), where=known)
        logs -= (1 - alpha) * np.log(top, out=np.zeros_like(top), where=known)
    if known.any():
        logs -= logs[known].mean()
    found = np.where(known, np.exp(logs), 1.0).astype(np.float32)
    return np.clip(found, 1 / _LARGEST, _LARGEST)


def output_error(kind: Kind, inputs: Inputs, samples: Sequence[Sample], by: Floats | None) -> float:
    """Mean square error of the samples' outputs: of rounding weights, and ("smooth") inputs to 8 bits."""
    divided = inputs.divided(by)
    total = 0.0
    for sample in samples:
        values = sample.values if by is None else sample.values * by
        stored = dequantize(sample.format, nearest(values, sample.format, divided.mean_square))
        total += divided.cost(stored - values)
        if kind == "smooth":
            total += _input_error(divided, values)
    return total


def _input_error(inputs: Inputs, values: Floats) -> float:
    """Of inputs rounded to 127 steps of their token's largest: a step's variance, or the input's if less."""
    step = float(inputs.p999.max(initial=0.0)) / 127
    noise = np.minimum(step * step / 12, inputs.mean_square)
    return float((np.square(values, dtype=np.float64).sum(axis=0) * noise).sum())
