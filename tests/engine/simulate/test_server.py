"""The simulated server: what must hold for any numbers, and agreement with the plan's prediction."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "plan"))

from models import machine, toy

from strata.device.timeline import Timeline, busy_seconds
from strata.engine.simulate.routes import HabitRoutes, habits
from strata.engine.simulate.server import Load, Served, Simulator, Speculation
from strata.engine.simulate.step_lanes import StepLanes
from strata.hardware.profile import HardwareProfile, Rate
from strata.hardware.profile_file import load_profile
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.plan.planner import make_plan
from strata.plan.speeds import speeds_of

LOAD = Load(requests=2, prompt=64, answer=12, served=2)


def planned(model: Footprint, hardware: HardwareProfile, **asked: Any) -> Plan:
    return make_plan(model, hardware, PlanOptions(**{"context": 1024, "reserve": 0, **asked}))


def serve(
    model: Footprint, hardware: HardwareProfile, plan: Plan, load: Load = LOAD, **options: Any
) -> Served:
    speeds = speeds_of(hardware, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    shape = model.moe_layers, max(1, model.experts), model.top_k
    routes = HabitRoutes(habits(model.experts), *shape, seed=5)
    return Simulator(model, speeds, plan, routes, **options).serve(load)


def faster(hardware: HardwareProfile, **factors: float) -> HardwareProfile:
    """The same machine with some of its device's speeds multiplied."""
    device = hardware.device
    assert device is not None
    rates = {name: Rate(getattr(device, name).value * by, "assumed") for name, by in factors.items()}
    return dataclasses.replace(hardware, device=dataclasses.replace(device, **rates))  # type: ignore[arg-type]


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 79), st.integers(1, 40), st.sampled_from(["cpu", "fetch"]), st.integers(1, 3))
def test_more_slots_are_never_slower(slots: int, more: int, misses: Any, requests: int) -> None:
    """LRU holds with more slots what it holds with fewer; a hit costs less than any miss."""
    model, hardware = toy(), machine(read=50e9)
    load = dataclasses.replace(LOAD, requests=requests)
    rates = []
    for count in (slots, min(80, slots + more)):
        plan = planned(model, hardware, slots=count, misses=misses, requests=requests)
        rates.append(serve(model, hardware, plan, load).rate)
    assert rates[1] >= rates[0] * 0.995  # which inserts the idle bus had room for differs a little


@settings(max_examples=12, deadline=None)
@given(st.floats(1.0, 8.0), st.integers(2, 60), st.sampled_from(["auto", "cpu", "fetch"]))
def test_a_faster_bus_is_never_slower(factor: float, slots: int, misses: Any) -> None:
    """But for what LRU loses by inserting more: it lets everything in that the idle bus can bring."""
    model, hardware = toy(), machine(read=50e9)
    plan = planned(model, hardware, slots=slots, misses=misses, requests=2)
    slow, fast = (serve(model, faster(hardware, to_device=by, to_host=by), plan).rate for by in (1.0, factor))
    assert fast >= slow * 0.9


@settings(max_examples=10, deadline=None)
@given(st.floats(1.0, 8.0))
def test_a_faster_device_and_memory_are_never_slower(factor: float) -> None:
    model, hardware = toy(), machine(read=50e9)
    plan = planned(model, hardware, slots=20, requests=2)
    slow = serve(model, hardware, plan)
    assert serve(model, faster(hardware, read=factor, macs=factor), plan).rate >= slow.rate * 0.995
    quick = dataclasses.replace(
        hardware, node_read=tuple(Rate(rate.value * factor, "assumed") for rate in hardware.node_read)
    )
    assert serve(model, quick, plan).rate >= slow.rate * 0.995


def test_everything_resident_costs_what_the_plan_says() -> None:
    """With all experts in slots there is nothing to decide: the two sums are one."""
    model, hardware = toy(), machine()
    plan = planned(model, hardware, depth=70)
    assert plan.device is not None and plan.device.slots == model.expert_count
    served = serve(model, hardware, plan, Load(1, 64, 12, 3, prefilled=True))
    assert served.hit_rate == 1.0 and served.from_disk == 0
    assert served.decode_rate == pytest.approx(plan.predictions[0].tokens_per_second, rel=0.01)


@pytest.mark.parametrize(("experts", "top_k", "share"), [(8, 2, 0.5), (64, 8, 0.25), (128, 8, 0.25)])
@pytest.mark.parametrize("requests", [1, 4])
def test_it_agrees_with_the_plan(experts: int, top_k: int, share: float, requests: int) -> None:
    """Decoding on a device with a share of the experts, within a factor of 1.5.

    Several requests have more in common than the plan takes for granted.
    """
    model = toy(
        experts=experts, top_k=top_k, expert_bytes=2 * 10**6, expert_macs=4 * 10**6,
        expert_total=2 * 10**7 * experts,
    )  # fmt: skip
    hardware = load_profile("rtx3090-2x-e5-2680v4")
    slots = int(share * model.expert_count)
    plan = planned(model, hardware, slots=slots, requests=requests, depth=96, kv_tier="device")
    served = serve(model, hardware, plan, Load(requests, 64, 64, requests, prefilled=True))
    predicted = next(p for p in plan.predictions if p.name == "decode" and p.requests == requests)
    assert 1 / 1.5 < served.decode_rate / predicted.tokens_per_second < 1.5


def test_without_a_device_the_host_does_everything() -> None:
    model, hardware = toy(), machine(device_gib=None)
    plan = planned(model, hardware, depth=70)
    served = serve(model, hardware, plan, Load(1, 64, 12, 2, prefilled=True))
    assert set(served.busy) == {"host", "handshakes"} and served.slots == 0 and served.hit_rate == 0.0
    assert served.decode_rate == pytest.approx(plan.predictions[0].tokens_per_second, rel=0.1)


def test_what_does_not_fit_into_memory_comes_from_disk() -> None:
    model = toy(expert_bytes=10**9, expert_total=80 * 10**9)
    hardware = machine(device_gib=None, node_gib=32)
    plan = planned(model, hardware)
    assert 0 < plan.host.in_memory < model.expert_count
    served = serve(model, hardware, plan)
    assert served.from_disk > 0 and served.bottleneck == "disk"
    larger = planned(model, machine(device_gib=None, node_gib=128))
    assert serve(model, hardware, larger).rate > served.rate


def test_pages_in_host_memory_cross_the_bus() -> None:
    hardware = machine()
    model = toy(attention=dataclasses.replace(toy().attention, new_bytes=100_000))
    load = Load(2, 512, 12, 2, prefilled=True)
    near, far = (
        serve(model, hardware, planned(model, hardware, kv_tier=tier, requests=2), load)
        for tier in ("device", "host")
    )
    assert far.bottleneck == "to_device" and far.rate < near.rate
    assert near.busy.get("to_host", 0.0) < far.busy["to_host"]


def test_drafts_that_are_always_right_pay_and_those_that_never_are_cost() -> None:
    model, hardware = toy(), machine()
    plan = planned(model, hardware)
    draft = toy(static=10**6, static_macs=10**6, moe_layers=0, layers=1, head=0, head_macs=0)
    load = Load(1, 64, 40, 2, prefilled=True)
    plain = serve(model, hardware, plan, load)
    good = serve(model, hardware, plan, load, speculation=Speculation(draft, 4, 1.0))
    bad = serve(model, hardware, plan, load, speculation=Speculation(draft, 4, 0.0))
    assert bad.rate < plain.rate < good.rate
    assert bad.tokens_per_step == 1.0 and good.tokens_per_step > 4


def test_a_long_prompt_takes_its_chunks_and_its_time() -> None:
    model, hardware = toy(), machine()
    plan = planned(model, hardware, chunk=32)
    served = serve(model, hardware, plan, Load(1, 64, 12, 3))
    free = serve(model, hardware, plan, Load(1, 64, 12, 3, prefilled=True))
    assert served.rate < free.rate and free.prefill_rate == 0.0
    assert served.first_token == pytest.approx(64 / served.prefill_rate, rel=0.05)


def test_the_lanes_add_up_to_the_steps() -> None:
    """Every layer lies inside its step, and no lane is busier than the cost model says."""
    model, hardware = toy(), machine(2)
    plan = planned(model, hardware, slots=30, kv_tier="host", requests=2)
    timeline = Timeline()
    served = serve(model, hardware, plan, lanes=StepLanes(timeline, plan))
    assert {"host", "compute", "h2d", "d2h", "socket 0", "socket 1"} <= set(timeline.lanes)
    steps = timeline.spans("host")
    assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(steps))
    for lane in ("compute", "socket 0"):
        for span in timeline.spans(lane):
            inside = [s for s in steps if s.start <= span.start + 1e-9 and span.end <= s.end + 1e-9]
            assert inside, span
    assert busy_seconds(timeline.spans("compute")) > 0 and served.busy["device"] > 0
