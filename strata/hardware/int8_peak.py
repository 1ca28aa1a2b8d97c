"""The most int8 multiply-adds per second, measured by the threads and CPUs that will do the work."""

from __future__ import annotations

from typing import Any


def int8_peak(cpu: Any, seconds: float = 0.05) -> float:
    """Multiply-adds/s of the threads of `cpu`, a `strata._C.Cpu`: in registers alone, best of some rounds."""
    from strata._C import int8_peak as measured  # here: whoever has a Cpu has loaded it, others may lack it

    return float(measured(cpu, seconds))
