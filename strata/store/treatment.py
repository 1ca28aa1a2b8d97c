"""What happens to the matrices of a store on their way: factors first, then rounding to codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import WeightFormat
from strata.store.pack import Codes
from strata.store.quantize import quantize
from strata.store.scaled_rows import NONE, Scaling

Floats = NDArray[np.float32]


class Rounding(Protocol):
    """f32 rows `[rows, cols]` -> codes."""

    def __call__(self, values: Floats, fmt: WeightFormat, name: str, first_row: int, /) -> Codes:
        """Codes of rows of matrix `name`, which begin at `first_row`."""
        ...


@dataclass(frozen=True)
class Treatment:
    """What happens to a packed matrix on its way: factors first, then the rounding."""

    scaling: Scaling
    rounding: Rounding


@dataclass(frozen=True)
class ExpertTreatment:
    """Likewise an expert. gate, up and down are scaled before gate and up are interleaved."""

    gate: Scaling
    up: Scaling
    down: Scaling
    gate_up_rounding: Rounding
    down_rounding: Rounding


PLAIN = Treatment(NONE, quantize)
PLAIN_EXPERT = ExpertTreatment(NONE, NONE, NONE, quantize, quantize)
