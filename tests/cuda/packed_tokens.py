"""What pack_activations.cu makes of activations, written down a second time."""

from __future__ import annotations

import numpy as np
from cases import bf16_bits, bf16_values

UNIT = 64


def packed_order() -> np.ndarray:
    """The column of a unit that lies in each of its 64 places: ldmatrix gives lane member m the word m."""
    step, pair, member, which = np.meshgrid(*(np.arange(n) for n in (4, 2, 4, 2)), indexing="ij")
    return (step // 2 * 32 + member * 8 + step % 2 * 4 + pair + which * 2).ravel()


def packed_tokens(x: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits u16 [rows, units * 64] and the f32 totals [rows, units, 4]; columns beyond x are zeros."""
    padded = np.zeros((len(x), units * UNIT), np.float32)
    padded[:, : x.shape[1]] = x
    bits = bf16_bits(padded).reshape(len(x), units, UNIT)
    halves = bf16_values(bits).astype(np.float64).reshape(len(x), units, 2, UNIT // 2).sum(axis=3)
    totals = np.zeros((len(x), units, 4), np.float32)
    totals[:, :, :2], totals[:, :, 2] = halves, halves.sum(axis=2)
    return bits[:, :, packed_order()].reshape(len(x), units * UNIT), totals
