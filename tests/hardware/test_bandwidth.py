"""The bandwidth probe on this machine."""

from __future__ import annotations

import pytest

from strata.backends.cpu import CpuBackend
from strata.errors import CapacityError
from strata.hardware.bandwidth import read_bandwidth


def test_bandwidth_is_plausible() -> None:
    measured = read_bandwidth(CpuBackend(threads=2).cpu, seconds=0.05, size=64 << 20)
    assert measured.passes >= 1
    assert 1e7 < measured.median <= measured.best < 1e13


def test_bandwidth_without_memory_is_a_sentence() -> None:
    with pytest.raises(CapacityError, match=str(1 << 56)):
        read_bandwidth(CpuBackend(threads=1).cpu, seconds=0.01, size=1 << 56)
