"""Shared fixtures: where the real cases live, and small things every group of tests needs."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of real cases; people who only have the repository skip what needs it."""
    if not CASES.is_dir():
        pytest.skip("the folder ../shared/cases is absent: it is not part of the repository")
    return CASES
