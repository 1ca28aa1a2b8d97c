"""The probes of memory and processor on this machine."""

from __future__ import annotations

import pytest

from strata.backends.cpu import CpuBackend
from strata.backends.isa import NAMES, extension
from strata.errors import CapacityError
from strata.hardware.bandwidth import read_bandwidth
from strata.hardware.int8_peak import int8_peak


def test_bandwidth_is_plausible() -> None:
    measured = read_bandwidth(CpuBackend(threads=2).cpu, seconds=0.05, size=64 << 20)
    assert measured.passes >= 1
    assert 1e7 < measured.median <= measured.best < 1e13


def test_bandwidth_without_memory_is_a_sentence() -> None:
    with pytest.raises(CapacityError, match=str(1 << 56)):
        read_bandwidth(CpuBackend(threads=1).cpu, seconds=0.01, size=1 << 56)


@pytest.mark.parametrize("isa", [name for name in NAMES if extension().features()[name]])
def test_int8_peak_is_plausible(isa: str) -> None:
    peaks = [int8_peak(CpuBackend(threads=n, isa_name=isa).cpu, 0.05) for n in (1, 2)]
    # One product per 10 ns would be an interpreter; 10^13 is beyond 64 cores of any x86-64 without AMX.
    assert all(1e8 < peak < 1e13 for peak in peaks)
