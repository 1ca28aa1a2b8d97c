"""What a method of quantization needs to know about the inputs of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.store.calibration import LinearStats
from strata.store.moments import weighted_error

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Inputs:
    """Statistics of x, the inputs: mean |x|, 99.9th percentile of |x| and mean x^2, f32 `[cols]`; moments:
    mean of x x^T, f32 `[cols, cols]`, where they were recorded. name: of the matrix, for errors."""

    name: str
    mean_abs: Floats
    p999: Floats
    mean_square: Floats
    moments: Floats | None

    @classmethod
    def of(cls, stats: LinearStats) -> Inputs:
        """Out of a STATS file."""
        return cls(stats.name, stats.mean_abs, stats.p999, stats.mean_square, stats.moments)

    def divided(self, factors: Floats | None) -> Inputs:
        """Of x / factors, f32 `[cols]`; None: the same."""
        if factors is None:
            return self
        by = np.float32(1) / factors
        moments = None if self.moments is None else self.moments * by[:, None] * by
        return Inputs(
            self.name, self.mean_abs * by, self.p999 * by, self.mean_square * np.square(by), moments
        )

    def cost(self, error: Floats) -> float:
        """The mean of |E x|^2 for an error E `[rows, cols]`; without moments channels count as unrelated."""
        if self.moments is not None:
            return weighted_error(error, self.moments)
        return float((np.square(error, dtype=np.float64).sum(axis=0) * self.mean_square).sum())
