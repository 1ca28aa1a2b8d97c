"""The border of the extension: numbers that no caller of ours gives, but that C++ would index with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.backends.cpu import CpuBackend
from strata.backends.isa import extension
from strata.store.formats import FORMATS, ExpertLayout

EXTENSION = extension()
LAYOUT = ExpertLayout(FORMATS["w4g64"], FORMATS["w4g64"], 64, 128, 2, False)


def numbers(**changed: int) -> dict[str, Any]:
    """The arguments of RecordShape for LAYOUT."""
    return {
        "gate_up_code": LAYOUT.gate_up_format.code,
        "down_code": LAYOUT.down_format.code,
        "hidden": LAYOUT.hidden,
        "slice_width": LAYOUT.slice_width,
        "slices": LAYOUT.slices,
        "slice_bytes": LAYOUT.slice_bytes,
        "down_offset": LAYOUT.down_offset(0),
        "gate_up_bias_offset": LAYOUT.gate_up_bias_offset,
        "down_bias_offset": LAYOUT.down_bias_offset,
        "record_bytes": LAYOUT.record_bytes,
        "biases": LAYOUT.biases,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_up_code": -1}, "no weight format has code -1"),
        ({"down_code": len(FORMATS)}, f"no weight format has code {len(FORMATS)}"),
        ({"down_code": 1 << 30}, "no weight format has code"),
        ({"hidden": 0}, "needs a hidden size, a width and slices"),
        ({"slice_width": -64}, "needs a hidden size, a width and slices"),
        ({"slices": 0}, "needs a hidden size, a width and slices"),
        ({"hidden": 65}, "the layout says|down begins at"),
        ({"slices": 1 << 30}, "do not fit"),
        ({"record_bytes": LAYOUT.payload_bytes - 1}, "do not fit"),
    ],
    ids=str,
)
def test_record_shapes_that_cannot_be_are_refused(changed: dict[str, int], message: str) -> None:
    EXTENSION.RecordShape(**numbers())
    with pytest.raises(ValueError, match=message):
        EXTENSION.RecordShape(**numbers(**changed))


@pytest.mark.parametrize("active", [[1, 0], [0, 0]])
def test_active_experts_must_ascend(active: list[int]) -> None:
    """They are searched by bisection: routes to one that is out of order would be dropped in silence."""
    records = [np.zeros(LAYOUT.record_bytes, np.uint8)] * 2
    x, ids, weights = np.ones((1, 64), np.float32), np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32)
    gating = EXTENSION.Gating("silu", 1.0, 1.0)
    shape = EXTENSION.RecordShape(**numbers())
    cpu = CpuBackend(threads=1).cpu
    EXTENSION.experts(cpu, x, ids, weights, [0, 1], records, shape, gating, False)
    with pytest.raises(ValueError, match="do not ascend"):
        EXTENSION.experts(cpu, x, ids, weights, active, records, shape, gating, False)
