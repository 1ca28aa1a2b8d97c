"""Rows of logits of which only the best are known: what a sampler needs that looks at no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BestRow(NamedTuple):
    """values f32 and ids i32 `[count]`, best first, the lowest id first among equals."""

    values: NDArray[np.float32]
    ids: NDArray[np.int32]


@dataclass(slots=True)
class BestRows:
    """values f32 and ids i32 `[rows, count]`. Sliced and walked through as the matrix of logits would be."""

    values: NDArray[np.float32]
    ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> BestRows:
        return BestRows(self.values[part], self.ids[part])

    def __iter__(self) -> Iterator[BestRow]:
        return map(BestRow, self.values, self.ids)


Row = NDArray[np.float32] | BestRow
Rows = NDArray[np.float32] | BestRows
