"""How sure a draft model is of its own guess, which says how often it is right."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

_EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Probabilities that part the bands: finer where many tokens in a row have to be right."""
GUESSES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95)
"""How often a guess of each band is thought to be right before any was tested: a little less than it says."""


def band(probability: float) -> int:
    """Of a guess to which its model gives this probability: 0 for the least sure ones."""
    return bisect_right(_EDGES, probability)


def trust(logits: NDArray[np.float32], token: int) -> int:
    """The band of a guess by its model's logits, f32 `[vocab]`, as they are.

    What a temperature, a penalty or a grammar makes of them is learnt with how often the band is right.

    In f32: 150,000 terms are off by far less than a band is wide.
    """
    differences = logits - logits[token]
    with np.errstate(over="ignore"):
        total = float(np.exp(differences, out=differences).sum())
    return band(1.0 / total)
