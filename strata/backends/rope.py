"""Rotary position embedding: the cosine and sine tables that every backend rotates with.

Frequencies follow transformers' `modeling_rope_utils` (5.24), rounding by rounding: they are f32 numbers
there, and at position 100,000 one unit in the last place of a frequency turns a pair by 0.006 rad.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata.plan.spec import RopeSpec

F32Array = NDArray[np.float32]

_ONE = np.float32(1)


def rope_tables(rope: RopeSpec, positions: NDArray[np.int32]) -> tuple[F32Array, F32Array]:
    """cos and sin of every position, each f32 `[rows, rotary_dim / 2]`, times `attention_factor`."""
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies(rope)[None, :]
    factor = np.float32(rope.attention_factor)
    # Cosines of the f32 angle, correctly rounded: libraries differ in the last bit, this is their middle.
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32) * factor, np.sin(wide).astype(np.float32) * factor


@lru_cache(maxsize=64)
def inverse_frequencies(rope: RopeSpec) -> F32Array:
    """Radians per token of each rotated pair, f32 `[rotary_dim / 2]`; read-only, shared between callers."""
    periods = _periods(rope)
    frequencies = _ONE / periods
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies = _yarn(rope, periods)
    frequencies.flags.writeable = False
    return frequencies


def _periods(rope: RopeSpec) -> F32Array:
    """theta ** (2i / rotary_dim). The exponent is f32 as in torch; the power is taken in f64 and rounded
    once, which meets torch's f32 power in all but about 1 % of the pairs (numpy's f32 power: 85 %)."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(max(rope.rotary_dim, 1))
    powers: F32Array = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    return powers


def _llama3(rope: RopeSpec, frequencies: F32Array) -> F32Array:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    wavelength = np.float32(2 * math.pi) / frequencies
    low, high, factor = (np.float32(v) for v in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    divided = np.where(wavelength > longest, frequencies / factor, frequencies)
    smooth = (np.float32(rope.original_context) / wavelength - low) / (high - low)
    blended = (_ONE - smooth) * divided / factor + smooth * divided
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, blended, divided)


def _yarn(rope: RopeSpec, periods: F32Array) -> F32Array:
    """YaRN (arXiv 2309.00071): fast pairs keep their frequency, slow ones are divided by `factor`."""
    low, high = _yarn_range(rope)
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = _ONE - np.clip(ramp, np.float32(0), _ONE)
    kept, divided = _ONE / periods, _ONE / (np.float32(rope.factor) * periods)
    blended: F32Array = divided * (_ONE - keep) + kept * keep
    return blended


def _yarn_range(rope: RopeSpec) -> tuple[float, float]:
    """First and last pair of the blend: those that turn beta_fast and beta_slow times in the old context."""

    def pair(turns: float) -> float:
        distance = math.log(rope.original_context / (turns * 2 * math.pi))
        return rope.rotary_dim * distance / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)
