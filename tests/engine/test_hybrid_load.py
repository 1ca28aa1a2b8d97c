"""What a plan becomes: stream buffers by the time of attention, and refusals that name the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.engine.hybrid_load import emulated_backend
from strata.errors import CapacityError
from strata.hardware.profile_file import load_profile
from strata.plan.footprint import Attention, Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.plan.planner import make_plan

MACHINE = load_profile("rtx3090-2x-e5-2680v4")
# Qwen3-30B-A3B in w4g64 experts and w4g128 attention, by its config.json; sizes to two digits.
QWEN3 = Footprint(
    name="Qwen3-30B-A3B",
    layers=48,
    moe_layers=48,
    hidden=2048,
    vocab=151_936,
    context=40_960,
    static=480_000_000,
    static_macs=920_000_000,
    head=160_000_000,
    head_macs=311_000_000,
    embedding=160_000_000,
    tied=False,
    experts=128,
    top_k=8,
    expert_bytes=2_506_752,
    expert_macs=4_718_592,
    expert_total=128 * 48 * 2_506_752,
    slices=2,
    attention=Attention((0,) * 48, 32 * 256, 1_056),
    kv_dtype="int8",
    page_tokens=32,
    activation_bytes=150_000,
)


def plan(chunk: int) -> Plan:
    return make_plan(QWEN3, MACHINE, PlanOptions(context=16_384, chunk=chunk, kv_tier="device"))


def test_a_plan_that_leaves_the_device_idle_is_refused() -> None:
    changed = replace(plan(512), device=None)
    with pytest.raises(CapacityError, match=r"(?s)leaves the device idle.*device\.use: none"):
        emulated_backend(None, None, None, changed, MACHINE, None)  # type: ignore[arg-type]
