"""Shared fixtures: where the real cases live, and small things every group of tests needs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: its thread barriers made tests on tiny models 14 times slower on a busy
# machine of two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a script starts in its background ignores Ctrl-C, and whatever tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No property may fail because the machine is busy. In continuous integration (CI is set) the examples are the
# same every time, so that a failure tells of the change at hand; everywhere else each run searches anew.
settings.register_profile(
    "strata",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("strata")

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of real cases; people who only have the repository skip what needs it."""
    if not CASES.is_dir():
        pytest.skip("the folder ../shared/cases is absent: it is not part of the repository")
    return CASES
