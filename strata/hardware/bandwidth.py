"""The memory's read speed, measured by the threads and CPUs that will do the work."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from strata.errors import CapacityError

PROBE_BYTES = 1 << 30
"""Well above any last-level cache (480 MB seen)."""


@dataclass(frozen=True)
class ReadBandwidth:
    """Bytes per second over some passes. The best pass is the machine's limit, the median its usual state."""

    median: float
    best: float
    passes: int


def read_bandwidth(cpu: Any, seconds: float = 0.5, size: int = PROBE_BYTES) -> ReadBandwidth:
    """Read `size` bytes over and over with all threads of `cpu`, a `strata._C.Cpu`, for `seconds`.

    CapacityError when the memory for the buffer is not there.
    """
    try:
        speeds = cpu.read_bandwidth(size, seconds)
    except MemoryError as error:
        raise CapacityError(
            f"no {size} bytes of memory for measuring its speed",
            remedy="end other programs, or raise the limit",
        ) from error
    return ReadBandwidth(median(speeds), max(speeds), len(speeds))
