"""Rows whose rows and columns are multiplied by factors on the way: what folded scales are applied by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.store.pack import Codes
from strata.store.rows import Rows

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scaling:
    """Factors of a matrix: f32 `[rows]` and `[cols]`, None for ones. Of an interleaved gate and up matrix,
    `rows` belongs to up's rows."""

    rows: Floats | None = None
    cols: Floats | None = None

    def __mul__(self, other: Scaling) -> Scaling:
        return Scaling(_product(self.rows, other.rows), _product(self.cols, other.cols))

    @property
    def trivial(self) -> bool:
        """Whether nothing is multiplied."""
        return self.rows is None and self.cols is None

    @property
    def columns_only(self) -> Scaling:
        """The same without factors of rows."""
        return Scaling(None, self.cols)


NONE = Scaling()


def _product(left: Floats | None, right: Floats | None) -> Floats | None:
    if left is None or right is None:
        return right if left is None else left
    return left * right


def scaled(rows: Rows, scaling: Scaling) -> Rows:
    """`rows` times the factors; the same object where there are none."""
    return rows if scaling.trivial else ScaledRows(rows, scaling)


class ScaledRows:
    """Rows of another matrix times factors. Its source's own quantization cannot be kept."""

    def __init__(self, rows: Rows, scaling: Scaling) -> None:
        for factors, size in ((scaling.rows, rows.count), (scaling.cols, rows.cols)):
            assert factors is None or factors.shape == (size,), (factors.shape, size)
        self._rows, self._scaling = rows, scaling

    @property
    def count(self) -> int:
        """Rows."""
        return self._rows.count

    @property
    def cols(self) -> int:
        """Columns."""
        return self._rows.cols

    def floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop), each product rounded once to f32 (twice where both kinds apply)."""
        values = self._rows.floats(start, stop)
        if self._scaling.cols is not None:
            values = values * self._scaling.cols
        if self._scaling.rows is not None:
            values = values * self._scaling.rows[start:stop, None]
        return values

    def kept(self, start: int, stop: int) -> Codes:
        """Never: `choose` keeps nothing where a method is asked for."""
        raise AssertionError("a scaled matrix cannot keep its source's codes")
