"""csrc/cuda/verify_draft.cu for a machine without a GPU: the sampler's choice out of a row's candidates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
LARGEST = float(np.finfo(np.float32).max)
MARGIN = 1e-6
"""Of all weights: settings and numbers arrive as f32, so nearer to a border than this nothing is certain."""
UNDECIDED = -1


def verify(
    values: F64, ids: NDArray[np.int32], draft: NDArray[np.int32], settings: F64, numbers: F64
) -> tuple[int, int]:
    """Tokens of the draft that are drawn, and the one behind them. values, ids: `[rows, top]` candidates."""
    for row, (logits, candidates, number) in enumerate(zip(values, ids, numbers, strict=True)):
        place = _drawn(logits, settings, float(number))
        token = int(candidates[place]) if place >= 0 else UNDECIDED
        if row + 1 == len(values) or token != draft[row]:
            break
    return row, token


def _drawn(logits: F64, settings: F64, number: float) -> int:
    """A candidate's place, or UNDECIDED."""
    inverse_temperature, top_p, log_min_p, top_k = settings.tolist()
    if logits[0] >= LARGEST:
        return UNDECIDED
    if inverse_temperature == 0.0:
        return 0
    logits = logits[: int(top_k)] if top_k > 0 else logits
    last = _at_share(logits, 1.0, top_p) if top_p < 1.0 else len(logits) - 1
    if last == UNDECIDED:
        return UNDECIDED
    logits = logits[: last + 1]
    least = [logits[0] + log_min_p * (1 + sign * MARGIN) for sign in (1, -1)]
    low, high = (max(1, int((logits >= border).sum())) for border in least)
    return _at_share(logits[:low], inverse_temperature, number) if low == high else UNDECIDED


def _at_share(logits: F64, inverse_temperature: float, share: float) -> int:
    """Where `share` of all weights is reached."""
    weights = np.exp((logits - logits[0]) * inverse_temperature)
    cumulated = np.cumsum(weights)
    possible = np.flatnonzero(weights)[-1]
    all_ = cumulated[-1]
    borders = (share - MARGIN) * all_, (share + MARGIN) * all_
    low, high = (min(int(np.searchsorted(cumulated, b, side="right")), possible) for b in borders)
    return int(low) if low == high else UNDECIDED
