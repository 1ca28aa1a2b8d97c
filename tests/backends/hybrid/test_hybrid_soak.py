"""Nine minutes of virtual serving; `soak.py --hours 4` is the whole of it."""

from __future__ import annotations

import pytest
from soak import Soak


@pytest.mark.parametrize("tier", ["device", "host"])
def test_virtual_serving_loses_nothing(tier: str) -> None:
    soak = Soak(seed=2, tier=tier)
    soak.run(hours=0.15)
    assert soak.counts["ended"] > 20 and soak.counts["compared"] > 2 and soak.counts["abort"] > 0
