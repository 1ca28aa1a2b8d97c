"""The cost model: sums done on paper, and what must hold for any numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import machine, toy

from strata.plan import cost
from strata.plan.cost import LayerCost, Placement, Step, step_cost
from strata.plan.footprint import Attention, Footprint
from strata.plan.routing import UNIFORM, HitCurve, published_curve
from strata.plan.speeds import DEVICE_READ_SHARE, HOST_MACS_SHARE, HOST_READ_SHARE, Speeds, speeds_of

PLAIN = Speeds(50e9, 1e12, 1e9, 500e9, 10e12, 10e9, 10e9)
ALL_HIT = HitCurve(((1e-9, 1.0),), "a test")
ON_DEVICE = Placement(True, 80, True, 80)
ON_HOST = Placement(False, 0, False, 80)


def test_speeds_of_a_machine() -> None:
    found = speeds_of(machine(2, 4), {0: 4, 1: 4}, "partition")
    assert found.host_read == pytest.approx(HOST_READ_SHARE * 100e9)
    assert found.host_macs == pytest.approx(HOST_MACS_SHARE * 8 * 100e9)
    assert found.device_read == pytest.approx(DEVICE_READ_SHARE * 1000e9)
    assert (found.to_device, found.disk_read) == (10e9, 1e9)


def test_interleaved_memory_is_slower_by_its_distance() -> None:
    near, far = (
        speeds_of(machine(2), {0: 4, 1: 4}, spread).host_read for spread in ("partition", "interleave")
    )
    assert far / near == pytest.approx((1 + 10 / 20) / 2)
    one = machine(1)
    assert speeds_of(one, {0: 4}, "interleave").host_read == speeds_of(one, {0: 4}, "partition").host_read


def test_half_of_the_cores_saturate_a_node() -> None:
    full, half, one = (speeds_of(machine(1, 8), {0: n}, "partition") for n in (8, 4, 1))
    assert half.host_read == full.host_read and one.host_read == pytest.approx(full.host_read / 4)
    assert half.host_macs == pytest.approx(full.host_macs / 2)


def test_a_token_with_every_expert_resident() -> None:
    """100 MB static, 50 MB head and 10 x 2 experts of 10 MB at 500 GB/s, and ten layers' launches."""
    found = step_cost(toy(), PLAIN, ON_DEVICE, Step.decode(1, 0), ALL_HIT)
    launches = 10 * cost.MOE_LAYER_KERNELS * cost.LAUNCH_SECONDS
    assert found.seconds == pytest.approx(350e6 / 500e9 + launches, rel=1e-3)
    assert found.misses == pytest.approx(0, abs=1e-6)
    assert found.busy["handshakes"] == pytest.approx(launches)


def test_a_token_on_the_host_alone() -> None:
    found = step_cost(toy(), PLAIN, ON_HOST, Step.decode(1, 0), UNIFORM)
    assert found.seconds == pytest.approx(350e6 / 50e9 + 10 * cost.HOST_LAYER_SECONDS, rel=1e-3)
    assert found.bottleneck == "host" and "device" not in found.busy


def test_attention_reads_the_context() -> None:
    """1 kB per token over all layers: 10,000 tokens are 10 MB; on the bus when pages are at the host."""
    step = Step.decode(1, 10_000)
    near = step_cost(toy(), PLAIN, ON_DEVICE, step, ALL_HIT)
    empty = step_cost(toy(), PLAIN, ON_DEVICE, Step.decode(1, 0), ALL_HIT)
    assert near.seconds - empty.seconds == pytest.approx(10e6 / 500e9, rel=1e-2)
    far = step_cost(toy(), PLAIN, dataclasses.replace(ON_DEVICE, kv_on_device=False), step, ALL_HIT)
    assert far.busy["to_device"] == pytest.approx(10e6 / 10e9)


def test_pages_cross_under_the_computation() -> None:
    """Pages in host memory cost nothing until the bus is the busier lane, and then just its time."""
    host_pages = dataclasses.replace(ON_DEVICE, kv_on_device=False)
    short, long = (step_cost(toy(), PLAIN, host_pages, Step.decode(1, d), ALL_HIT) for d in (1000, 60_000))
    near = step_cost(toy(), PLAIN, ON_DEVICE, Step.decode(1, 1000), ALL_HIT)
    assert short.seconds == pytest.approx(near.seconds)
    assert long.seconds == pytest.approx(60e6 / 10e9 + 50e6 / 500e9, rel=1e-2)
    assert long.bottleneck == "to_device"


def test_a_window_ends_the_growth() -> None:
    model = toy(attention=Attention((128, 0) * 5, 1000, 100))
    assert model.attention.seen(1000) == 5 * 128 + 5 * 1000
    assert model.attention.seen(100) == 10 * 100


def test_misses_by_hand() -> None:
    """Half resident, uniform: one of the two experts of a token is missed, 10 MB: 200 us on the host at
    50 GB/s, 1 ms on the bus at 10 GB/s; the hit takes 20 us."""
    place = Placement(True, 40, True, 80, "cpu")
    cpu = step_cost(toy(), PLAIN, place, Step.decode(1, 0), UNIFORM)
    assert cpu.misses == pytest.approx(1.0)
    base = 150e6 / 500e9 + 10 * cost.MOE_LAYER_KERNELS * cost.LAUNCH_SECONDS
    trip = cost.ROUND_TRIP_SECONDS + 2 * 4000 / 10e9
    assert cpu.seconds == pytest.approx(base + 10 * (200e-6 + trip), rel=1e-3)
    fetch = step_cost(toy(), PLAIN, dataclasses.replace(place, misses="fetch"), Step.decode(1, 0), UNIFORM)
    assert fetch.seconds == pytest.approx(base + 10 * (1e-3 + cost.COPY_SECONDS), rel=1e-3)
    auto = step_cost(toy(), PLAIN, dataclasses.replace(place, misses="auto"), Step.decode(1, 0), UNIFORM)
    assert auto.seconds == pytest.approx(cpu.seconds) and auto.fetched == 0


def test_a_fast_bus_fetches() -> None:
    quick = dataclasses.replace(PLAIN, to_device=400e9)
    found = step_cost(toy(), quick, Placement(True, 40, True, 80), Step.decode(1, 0), UNIFORM)
    assert found.fetched == pytest.approx(found.misses)


def test_work_is_split_where_both_help() -> None:
    layer = LayerCost(0.0, 0.0, 0.0, on_device=0.1, on_host=1.0, on_bus=2.0, on_disk=0.0)
    assert layer.split(0, 9, "auto") == 3  # the host takes 6 s for six, the bus 6 s for three
    assert layer.split(0, 9, "cpu") == 0 and layer.split(0, 9, "fetch") == 9
    assert layer.split(0, 0, "auto") == 0


def test_large_chunks_stream_ahead_of_the_router() -> None:
    """A chunk that needs nearly all experts fetches them under the attention of earlier layers."""
    model = toy(static_macs=10**10)  # a second of shared work on the device
    place = Placement(True, 8, True, 80, "fetch")
    found = step_cost(model, PLAIN, place, Step.prefill(1000, 0), UNIFORM)
    device = 1000 * (10**10 + 10 * 2 * 20e6) / 10e12
    assert found.seconds == pytest.approx(
        device + 10 * cost.MOE_LAYER_KERNELS * cost.LAUNCH_SECONDS, rel=0.01
    )
    assert found.busy["to_device"] == pytest.approx(10 * 7.2 * 10e6 / 10e9, rel=0.01)


def test_experts_on_disk() -> None:
    """Nothing resident, half in memory, uniform: one of two comes from the disk, 10 MB at 1 GB/s."""
    place = Placement(False, 0, False, 40)
    found = step_cost(toy(), PLAIN, place, Step.decode(1, 0), UNIFORM)
    assert found.bottleneck == "disk"
    assert found.busy["disk"] == pytest.approx(10 * 10e6 / 1e9)


def test_a_dense_model_has_no_experts() -> None:
    model = toy(moe_layers=0, experts=0, top_k=0, expert_bytes=0, expert_macs=0, expert_total=0)
    found = step_cost(
        model, PLAIN, dataclasses.replace(ON_DEVICE, slots=0, in_memory=0), Step.decode(1, 0), UNIFORM
    )
    assert found.distinct == found.misses == 0
    assert found.seconds == pytest.approx(
        150e6 / 500e9 + 10 * cost.DENSE_LAYER_KERNELS * cost.LAUNCH_SECONDS, rel=1e-3
    )


def test_products_limit_large_batches() -> None:
    """2,000 tokens: 2,000 x (200 + 10 x 2 x 20 + 0) million multiply-adds at 10 T/s."""
    found = step_cost(toy(), PLAIN, ON_DEVICE, Step.prefill(2000, 0), ALL_HIT)
    attention = 2000 * 10 * 1000 * 1000 / 10e12
    assert found.seconds == pytest.approx(2000 * 600e6 / 10e12 + attention, rel=0.02)


SPEED = st.floats(1e8, 1e13)
STEPS = st.builds(
    lambda prefill, tokens, depth: (
        Step.prefill(tokens, depth) if prefill else Step.decode(min(tokens, 64), depth)
    ),
    st.booleans(),
    st.integers(1, 5000),
    st.integers(0, 60_000),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Footprint, Speeds, Placement, Step]:
    experts = draw(st.integers(1, 128))
    model = toy(
        experts=experts,
        top_k=draw(st.integers(1, min(8, experts))),
        moe_layers=draw(st.integers(1, 10)),
        expert_bytes=draw(st.integers(1000, 10**9)),
        expert_macs=draw(st.integers(1000, 10**9)),
    )
    place = Placement(
        draw(st.booleans()),
        draw(st.integers(0, model.expert_count)),
        draw(st.booleans()),
        draw(st.integers(0, model.expert_count)),
        draw(st.sampled_from(["auto", "cpu", "fetch"])),
    )
    if not place.on_device:
        place = dataclasses.replace(place, slots=0)
    return model, Speeds(*(draw(SPEED) for _ in range(7))), place, draw(STEPS)


@settings(deadline=None)
@given(cases())
def test_no_lane_works_longer_than_the_step(case: Any) -> None:
    model, speeds, place, step = case
    found = step_cost(model, speeds, place, step, published_curve(model.experts))
    assert found.seconds > 0 and all(seconds >= 0 for seconds in found.busy.values())
    for lane, seconds in found.busy.items():
        if lane != "handshakes":
            assert seconds <= found.seconds * (1 + 1e-9), lane
    assert found.busy[found.bottleneck] == max(found.busy.values())
    assert 0 <= found.fetched <= found.misses + 1e-9 <= found.distinct + 2e-9


@settings(deadline=None)
@given(cases(), st.integers(0, 6), st.floats(1, 10))
def test_a_faster_part_never_slows_a_step(case: Any, which: int, times: float) -> None:
    model, speeds, place, step = case
    name = dataclasses.fields(Speeds)[which].name
    quick = dataclasses.replace(speeds, **{name: getattr(speeds, name) * times})
    curve = published_curve(model.experts)
    before, after = (step_cost(model, s, place, step, curve).seconds for s in (speeds, quick))
    assert after <= before * (1 + 1e-9)


@settings(deadline=None)
@given(cases())
def test_auto_is_never_slower_than_either_way(case: Any) -> None:
    model, speeds, place, step = case
    seconds = {
        mode: step_cost(model, speeds, dataclasses.replace(place, misses=mode), step, UNIFORM).seconds
        for mode in ("auto", "cpu", "fetch")
    }
    assert seconds["auto"] <= min(seconds["cpu"], seconds["fetch"]) * (1 + 1e-9)


@settings(deadline=None)
@given(cases())
def test_more_context_never_takes_less_time(case: Any) -> None:
    model, speeds, place, step = case
    deeper = dataclasses.replace(step, depth=step.depth + 1000)
    before, after = (step_cost(model, speeds, place, s, UNIFORM).seconds for s in (step, deeper))
    assert before <= after * (1 + 1e-9)
