"""PTX types as numpy types, and the 16-bit floats that numpy lacks."""

from __future__ import annotations

import functools
import re

import numpy as np

U8, U16, U32, U64 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}
_KINDS = {"u": "u", "b": "u", "s": "i", "f": "f"}


@functools.cache
def numpy_type(ptx_type: str) -> np.dtype:
    """E.g. "s32" -> int32; packed pairs ("f16x2") are u32."""
    if ptx_type.endswith("x2"):
        return U32
    if ptx_type == "bf16":
        return U16
    match = re.fullmatch(r"([ubsf])(\d+)", ptx_type)
    assert match, f"unknown type {ptx_type}"
    return np.dtype(_KINDS[match[1]] + str(int(match[2]) // 8))


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(U32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(U32).astype(U64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(U16)


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def f32_to_f16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(U16)


def halves(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 16 bits."""
    return (pairs & np.uint32(0xFFFF)).astype(U16), (pairs >> np.uint32(16)).astype(U16)


def join_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(U32) | high.astype(U32) << np.uint32(16)
