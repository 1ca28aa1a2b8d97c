"""What a plan becomes: stream buffers by the time of attention, and refusals that name the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_sizes import QWEN3

from strata.engine.device_run import DeviceRun
from strata.engine.hybrid_load import device_backend
from strata.errors import CapacityError
from strata.hardware.profile_file import load_profile
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.plan.planner import make_plan

MACHINE = load_profile("rtx3090-2x-e5-2680v4")


def plan(chunk: int) -> Plan:
    return make_plan(QWEN3, MACHINE, PlanOptions(context=16_384, chunk=chunk, kv_tier="device"))


def test_a_plan_that_leaves_the_device_idle_is_refused() -> None:
    changed = replace(plan(512), device=None)
    with pytest.raises(CapacityError, match=r"(?s)leaves the device idle.*device\.use: none"):
        device_backend(None, None, None, changed, DeviceRun(MACHINE), None)  # type: ignore[arg-type]
