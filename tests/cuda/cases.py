"""A case: one launch, its inputs and what must come out. Emulator, PTX simulation and mutants run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from runners import Argument, Call

from strata.backends.cuda.launch_shapes import LaunchShape


@dataclass(frozen=True)
class Prepared:
    """check() raises unless the call's outputs are right.

    streams: bytes that the launch must read of arguments (weights, KV pages), by the arguments' indices;
    `reached` arrays come after the arguments.
    """

    call: Call
    check: Callable[[], None]
    streams: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """make() gives fresh arrays each time. ptx: also worth the slow PTX simulation."""

    name: str
    file: str
    make: Callable[[], Prepared]
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.file}-{self.name}"


def call_of(
    shape: LaunchShape, arguments: tuple[Argument, ...], reached: tuple[np.ndarray, ...] = ()
) -> Call:
    return Call(shape.file, shape.entry, shape.grid, shape.block, shape.shared_bytes, arguments, reached)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """f32 rounded to nearest even, as u16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Largest difference at most tolerance times the largest expected magnitude; NaN never passes."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    worst = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert worst <= tolerance, f"off by {worst:.2e} of the largest value, at most {tolerance:.0e} allowed"
