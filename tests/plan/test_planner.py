"""What fits where: sums to the byte, worst cases, refusals with both numbers, and what is predicted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from checks import check, part
from hypothesis import given, settings
from hypothesis import strategies as st
from models import GB, GIB, machine, toy

from strata.errors import CapacityError, ConfigError
from strata.plan.advice import advise
from strata.plan.device import DRIVER_BYTES, workspace_bytes
from strata.plan.footprint import Attention, Footprint
from strata.plan.host import PROCESS_BYTES, PROCESS_SHARE
from strata.plan.options import PlanOptions
from strata.plan.planner import make_plan
from strata.plan.stream import StreamRing

MIB = 1 << 20
BIG = toy(expert_total=80 * 10 * 10**8, expert_bytes=10**9)  # 80 experts of 1 GB


@pytest.mark.parametrize(
    ("asked", "requests", "running"), [(None, 1, 16), (None, 40, 40), (3, 1, 3), (3, 40, 3)]
)
def test_requests_of_a_step(asked: int | None, requests: int, running: int) -> None:
    """16 unless told otherwise, or as many as may fill the context."""
    options = PlanOptions(context=64, requests=requests, max_running=asked)
    assert make_plan(toy(), machine(), options).running == running


def test_a_device_plan_by_hand() -> None:
    """Toy experts of 10 MB: what is left of 2 GiB after 100 + 50 MB, workspace, driver, reserve and KV."""
    options = PlanOptions(context=1024, chunk=512, reserve=256 * MIB, kv_tier="device")
    plan = make_plan(toy(), machine(device_gib=2), options)
    check(plan, toy())
    best = 2 * 64 * (1 + 13)  # scores and ids: 64 of a row, and of each of its 13 blocks of 4,096
    step = (512 + 64) * 40_000 + 64 * (50_000 + 2001 + best) * 4 + 64 * 256
    workspace = -(-(step + 2 * 4 * 10 * 10**6) // MIB) * MIB
    assert part(plan, "workspace") == workspace
    assert part(plan, "KV pages") == 32 * 32 * 1000
    assert (part(plan, "driver"), part(plan, "reserve")) == (DRIVER_BYTES, 256 * MIB)
    left = 2 * GIB - 150 * 10**6 - workspace - DRIVER_BYTES - 256 * MIB - 32 * 32 * 1000
    assert plan.device is not None and plan.device.slots == min(80, left // 10**7)
    assert part(plan, "embedding", "host") == 50 * 10**6
    assert part(plan, "experts", "host") == 800 * 10**6


def test_the_ceiling_of_the_kv_cache_by_hand() -> None:
    """Qwen3-30B-A3B: 2 x 48 layers x 4 KV heads x 128 x 1 byte, and a scale of 4 bytes per head."""
    model = toy(attention=Attention((0,) * 48, 1, 2 * 4 * (128 + 4)), layers=48)
    assert model.kv_ceiling(32_768, 4) == 2 * 48 * 4 * (128 + 4) * 32_768 * 4
    assert model.kv_ceiling(33, 1) == 64 * 2 * 48 * 4 * 132  # whole pages


def test_a_tied_head_is_the_embedding_on_the_device() -> None:
    plan = make_plan(toy(tied=True), machine(), PlanOptions(context=1024))
    assert part(plan, "head") == 50 * 10**6 and part(plan, "embedding", "host") == 0


def test_without_a_device_the_host_plans_alone() -> None:
    for hardware, options in (
        (machine(device_gib=None), PlanOptions(context=1024)),
        (machine(), PlanOptions(context=1024, device=False)),
    ):
        plan = make_plan(toy(), hardware, options)
        check(plan, toy())
        assert plan.device is None and plan.misses == "cpu"
        assert part(plan, "shared weights", "host") == 200 * 10**6
        assert part(plan, "free", "host") == 64 * GIB - PROCESS_BYTES - 10**9 - 32 * 32 * 1000


def test_a_device_that_is_too_small_stays_idle() -> None:
    plan = make_plan(toy(static=30 * GB), machine(), PlanOptions(context=1024))
    check(plan, toy(static=30 * GB))
    assert plan.device is None
    (note,) = (text for text in plan.notes if "stays idle" in text)
    needed = 30 * GB + 50 * 10**6 + DRIVER_BYTES + 3 * GIB + 2 * 10**7
    needed += workspace_bytes(toy(), PlanOptions(), StreamRing(2, 4))
    assert str(needed) in note and str(24 * GIB) in note and "device.reserve" in note


def test_what_only_a_device_gives_is_insisted_on() -> None:
    huge = toy(static=30 * GB)
    for options in (PlanOptions(slots=4), PlanOptions(kv_tier="device"), PlanOptions(workspace=GIB)):
        with pytest.raises(CapacityError, match="bytes of device memory are needed"):
            make_plan(huge, machine(), options)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (PlanOptions(slots=1), "experts.slots is 1; a token takes 2 in each layer, the model has 80"),
        (PlanOptions(slots=81), "experts.slots is 81"),
        (
            PlanOptions(workspace=MIB),
            f"{workspace_bytes(toy(), PlanOptions(), StreamRing(2, 4))} bytes of workspace, .* allows {MIB}",
        ),
        (
            PlanOptions(kv_tier="device", context=65_536, requests=400),
            "26214400000 bytes for 400 x 65536 tokens",
        ),
        (
            PlanOptions(kv_bytes=10**6, context=65_536, kv_tier="device"),
            "65536000 bytes .* 1000000 are available",
        ),
        (PlanOptions(device_memory=25 * GIB, slots=4), f"is {25 * GIB} bytes, the card has {24 * GIB}"),
        (PlanOptions(host_memory=65 * GIB), f"is {65 * GIB} bytes, this process may use {64 * GIB}"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers(options: PlanOptions, cause: str) -> None:
    with pytest.raises(CapacityError, match=cause) as caught:
        make_plan(toy(), machine(), options)
    assert caught.value.remedy


def test_a_context_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match="a context of 65537 tokens, but toy was made for 65536"):
        make_plan(toy(), machine(), PlanOptions(context=65_537))


def test_a_host_that_is_too_small() -> None:
    needed = GIB // PROCESS_SHARE + 2100 * 10**6 + 32_000
    with pytest.raises(CapacityError, match=f"{needed} bytes of host memory are needed .* {GIB} are free"):
        make_plan(toy(static=2000 * 10**6), machine(node_gib=1, device_gib=None), PlanOptions())


def test_a_limit_beats_the_machine() -> None:
    """A container's limit is what may be used, whatever the nodes have."""
    boxed = machine(device_gib=None, memory_limit=4 * GIB, available=4 * GIB)
    plan = make_plan(toy(), boxed, PlanOptions(context=1024))
    assert plan.host.total == 4 * GIB
    check(plan, toy())


def test_experts_that_do_not_fit_stay_on_disk() -> None:
    plan = make_plan(BIG, machine(device_gib=None, node_gib=64), PlanOptions(context=1024))
    check(plan, BIG)
    room = 64 * GIB - PROCESS_BYTES - 200 * 10**6 - plan.kv.nbytes
    assert plan.host.in_memory == room // 10**9 == 67
    assert plan.host.disk_bytes == 13 * 10**9
    assert any("13000000000 bytes of experts do not fit" in text for text in plan.notes)
    assert plan.predictions[0].bottleneck == "disk"
    advised = advise(plan, BIG, machine(device_gib=None, node_gib=64), PlanOptions(context=1024), {})
    assert any("16 GiB more host memory" in entry.change and entry.decode > 1.5 for entry in advised.advice)


@pytest.mark.parametrize(
    ("asked", "fits"),
    [("partition", True), ("interleave", True), ("replicate", False), (None, True)],
)
def test_weights_over_two_sockets(asked: Any, fits: bool) -> None:
    """case-34: 90 GB of experts and 2 x 64 GB: copies for both nodes cannot be, the other ways can."""
    model = toy(expert_bytes=9 * 10**9 // 8, expert_total=90 * GB)
    hardware = machine(2, node_gib=60, device_gib=None)
    options = PlanOptions(context=1024, spread=asked)
    if not fits:
        with pytest.raises(CapacityError) as caught:
            make_plan(model, hardware, options)
        assert f"needs {90 * GB} bytes on each of 2 nodes" in caught.value.cause
        assert "partition fits" in caught.value.remedy
        return
    plan = make_plan(model, hardware, options)
    check(plan, model)
    assert plan.host.spread == (asked or "partition")
    shares = {entry.spread: (entry.nbytes, entry.problem) for entry in plan.host.spreads}
    assert shares["partition"] == ((45 * GB, 45 * GB), "")
    assert shares["interleave"] == ((45 * GB, 45 * GB), "")
    assert shares["replicate"] == ((90 * GB, 90 * GB), "does not fit")


def test_copies_on_both_sockets_are_counted_twice() -> None:
    plan = make_plan(toy(), machine(2, device_gib=None), PlanOptions(context=1024, spread="replicate"))
    check(plan, toy())
    assert part(plan, "experts", "host") == 2 * 800 * 10**6 and plan.host.in_memory == 80
    limited = machine(2, device_gib=None, memory_limit=2 * GIB, available=2 * GIB)
    with pytest.raises(CapacityError, match=r"host\.numa replicate needs 800000000 bytes on each of 2 nodes"):
        make_plan(toy(), limited, PlanOptions(context=1024, spread="replicate"))


def test_experts_that_are_not_cut_cannot_be_partitioned() -> None:
    whole = toy(slices=1)
    plan = make_plan(whole, machine(2), PlanOptions(context=1024))
    assert plan.host.spread == "interleave"
    assert plan.host.spreads[0].problem == "experts have 1 slices"
    with pytest.raises(CapacityError, match="multiple of 2 slices of every expert"):
        make_plan(whole, machine(2), PlanOptions(context=1024, spread="partition"))


def test_threads_stay_inside_the_cpuset() -> None:
    """case-32: of two nodes one has no allowed CPU; threads are planned for the other."""
    two = machine(2, cores=4)
    nodes = (two.nodes[0], dataclasses.replace(two.nodes[1], cpus=(), cores=()))
    plan = make_plan(toy(), dataclasses.replace(two, nodes=nodes), PlanOptions(context=1024))
    assert [(entry.node, entry.cpus) for entry in plan.threads] == [(0, (0, 1, 2, 3))]
    assert not plan.bind and len(plan.cpus) == 4  # all of them are near the same memory
    more = make_plan(toy(), dataclasses.replace(two, nodes=nodes), PlanOptions(context=1024, threads=99))
    assert len(more.cpus) == 4 and any("99 threads asked for" in text for text in more.warnings)


def test_a_quota_limits_the_threads() -> None:
    plan = make_plan(toy(), machine(2, cores=4, quota=2.5), PlanOptions(context=1024))
    assert len(plan.cpus) == 3


def test_kv_pages_go_where_decoding_is_faster() -> None:
    """A long context in host memory crosses the bus in every step; few requests fit on the device."""
    plan = make_plan(toy(), machine(), PlanOptions(context=65_536, depth=65_535))
    assert plan.kv.tier == "device"
    forced = make_plan(toy(), machine(), PlanOptions(context=65_536, depth=65_535, kv_tier="host"))
    check(forced, toy())
    assert forced.predictions[0].bottleneck == "to_device"
    assert forced.predictions[0].tokens_per_second < plan.predictions[0].tokens_per_second
    assert part(forced, "KV staging") == 2 * 65_536 * 100
    # What fits nowhere else goes to the host.
    many = make_plan(toy(), machine(), PlanOptions(context=65_536, requests=350))
    check(many, toy())
    assert many.kv.tier == "host"


def test_the_border_between_slots_and_pages_moves() -> None:
    """Predictions use the slots beside the pages in use; promised are those beside full pages."""
    model = dataclasses.replace(BIG, attention=Attention((0,) * 10, 1000, 10_000))  # 100 kB per token
    plan = make_plan(model, machine(), PlanOptions(context=65_536, kv_tier="device"))
    check(plan, model)
    assert plan.device is not None and plan.device.slots_beside(0) >= plan.device.slots + 6
    shallow, full = plan.predictions[0], plan.predictions[1]
    assert (shallow.depth, full.depth) == (4096, 65_535) and shallow.hit_rate > full.hit_rate


def test_auto_context_leaves_room_for_weights() -> None:
    plan = make_plan(toy(context=1 << 24), machine(node_gib=3, device_gib=None), PlanOptions())
    assert plan.kv.context == int(3 * GIB * 0.5) // 32_000 * 32
    full = toy(context=1 << 24, expert_total=2 * GB)
    crowded = make_plan(full, machine(node_gib=3, device_gib=None), PlanOptions())
    assert crowded.kv.context == (3 * GIB - full.total) // 32_000 * 32


def test_it_is_plain_data() -> None:
    plan = make_plan(toy(), machine(2), PlanOptions(context=1024))
    again = json.loads(json.dumps(plan.to_json()))
    assert again["device"]["slots"] == 80 and again["kv"]["tier"] == "device"
    assert again["predictions"][0]["bottleneck"] == plan.predictions[0].bottleneck


MODELS = st.builds(
    lambda experts, top_k, size, kv, static: toy(
        experts=experts,
        top_k=min(top_k, experts),
        expert_bytes=size,
        expert_total=10 * experts * size,
        attention=Attention((0,) * 10, 1000, kv),
        static=static,
    ),
    st.integers(1, 128),
    st.integers(1, 8),
    st.integers(4096, 100 * 10**6),
    st.integers(1, 10_000),
    st.integers(10**6, 10 * 10**9),
)
OPTIONS = st.builds(
    PlanOptions,
    context=st.one_of(st.none(), st.integers(2, 65_536)),
    requests=st.integers(1, 32),
    depth=st.one_of(st.none(), st.integers(0, 65_536)),
    chunk=st.integers(1, 4096),
    reserve=st.integers(0, 4 * GIB),
    kv_tier=st.sampled_from([None, "device", "host"]),
    kv_bytes=st.one_of(st.none(), st.integers(MIB, 64 * GIB)),
    misses=st.sampled_from(["auto", "cpu", "fetch"]),
    device=st.booleans(),
)
MACHINES = st.builds(machine, st.integers(1, 4), st.integers(1, 8), st.integers(2, 128), st.floats(0.5, 80))


@settings(deadline=None, max_examples=300)
@given(MODELS, MACHINES, OPTIONS)
def test_every_plan_adds_up(model: Footprint, hardware: Any, options: PlanOptions) -> None:
    try:
        plan = make_plan(model, hardware, options)
    except CapacityError as error:
        assert error.remedy and sum(word.strip(",;").isdigit() for word in error.cause.split()) >= 1
        return
    check(plan, model)
    if options.context is not None:
        assert plan.kv.context == options.context
    if options.kv_bytes is not None:
        assert plan.kv.nbytes <= options.kv_bytes


@settings(deadline=None)
@given(MODELS, OPTIONS, st.floats(4, 60), st.floats(0, 20), st.sampled_from(["device", "host"]))
def test_more_device_memory_never_means_fewer_slots(
    model: Footprint, options: PlanOptions, gib: float, more: float, tier: Any
) -> None:
    options = dataclasses.replace(options, context=options.context or 4096, kv_tier=tier, device=True)
    try:
        small = make_plan(model, machine(device_gib=gib), options)
    except CapacityError:
        return
    large = make_plan(model, machine(device_gib=gib + more), options)
    if small.device is None:
        return
    assert large.device is not None and large.device.slots >= small.device.slots
    rates = [plan.predictions[0].tokens_per_second for plan in (small, large)]
    # The cost between whole numbers of misses is interpolated. Where some come from the disk, fewer misses
    # mean a larger share of each, and the longer of two lanes, averaged, grows with what varies (1.3 % seen).
    assert small.predictions[0].busy.get("disk") or rates[1] >= rates[0] * (1 - 1e-6)


@settings(deadline=None)
@given(MODELS, st.integers(2, 65_536), st.integers(1, 16), st.integers(1, 8))
def test_a_longer_worst_case_never_takes_less(
    model: Footprint, context: int, requests: int, times: int
) -> None:
    context = min(context, 65_536 // times)
    base = model.kv_ceiling(context, requests)
    assert model.kv_ceiling(context * times, requests) >= base
    assert model.kv_ceiling(context, requests * times) == base * times
    assert base >= context * requests * model.attention.token_bytes
