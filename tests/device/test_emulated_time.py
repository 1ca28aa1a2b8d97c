"""Virtual time: sums that can be made in the head, on a device of one byte per nanosecond."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from device_figures import ROUND
from hypothesis import given
from hypothesis import strategies as st

from strata.device.base import Copy, EventError, Launch, Work
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_clock import Engine
from strata.device.figures import DeviceFigures, LinkFigures
from strata.device.python_kernel import PythonKernel
from strata.device.timeline import Timeline, overlap_seconds
from strata.errors import HardwareError

US = pytest.approx
NOTHING = PythonKernel("nothing", lambda reads, writes: None)


def elapsed_us(device: EmulatedDevice, action) -> float:  # type: ignore[no-untyped-def]
    """Microseconds between events around what `action(stream)` does."""
    stream, start, end = device.stream("s"), device.event(timing=True), device.event(timing=True)
    device.record(start, stream)
    action(stream)
    device.record(end, stream)
    device.sync(end)
    return device.elapsed_ms(start, end) * 1e3


def test_a_copy_costs_handshake_latency_and_bytes() -> None:
    device = EmulatedDevice(ROUND)
    host, slots = device.host_alloc(5000, "host"), device.alloc(5000, "slots")
    assert elapsed_us(device, lambda s: device.copy(slots, host, s)) == US(10 + 1 + 5)
    assert elapsed_us(device, lambda s: device.copy(host, slots, s)) == US(10 + 1 + 5)


def test_a_batch_makes_one_handshake() -> None:
    device = EmulatedDevice(ROUND)
    host, slots = device.host_alloc(5000, "host"), device.alloc(5000, "slots")
    parts = [Copy(slots.slice(i * 1000, 1000), host.slice(i * 1000, 1000)) for i in range(5)]
    assert elapsed_us(device, lambda s: device.copy_batch(parts, s)) == US(10 + 5 * 1 + 5)
    assert elapsed_us(device, lambda s: [device.copy(*part, s) for part in parts]) == US(5 * (10 + 1 + 1))


@pytest.mark.parametrize(
    ("work", "microseconds"), [(Work(), 5), (Work(2000, 1000), 7), (Work(1000, 3000), 8)]
)
def test_a_kernel_takes_the_longer_of_its_bytes_and_its_products(work: Work, microseconds: float) -> None:
    device = EmulatedDevice(ROUND)
    launch = Launch(NOTHING, work=work)
    assert elapsed_us(device, lambda s: device.launch(launch, s)) == US(microseconds)


def test_fill_writes_once_and_a_copy_inside_the_device_reads_and_writes() -> None:
    device = EmulatedDevice(ROUND)
    first, second = device.alloc(1000, "a"), device.alloc(1000, "b")
    assert elapsed_us(device, lambda s: device.fill(first, 0, s)) == US(5 + 1)
    assert elapsed_us(device, lambda s: device.copy(second, first, s)) == US(5 + 2)


def test_kernels_of_two_streams_take_turns_and_copies_run_beside_them() -> None:
    timeline = Timeline()
    device = EmulatedDevice(ROUND, timeline=timeline)
    streams = [device.stream("a"), device.stream("b"), device.stream("up"), device.stream("down")]
    host, slots = device.host_alloc(9000, "host"), device.alloc(9000, "slots")
    for stream in streams[:2]:
        device.launch(Launch(NOTHING, work=Work(15_000)), stream)
    device.copy(slots, host, streams[2])
    other_host, other = device.host_alloc(9000, "host 2"), device.alloc(9000, "other")
    device.copy(other_host, other, streams[3])
    device.sync()
    assert device.now() == US(40e-6)
    compute = timeline.spans("compute")
    assert [(s.start, s.end) for s in compute] == [(0.0, US(20e-6)), (US(20e-6), US(40e-6))]
    for lane in ("h2d", "d2h"):
        assert overlap_seconds(timeline.spans(lane), compute) == US(20e-6)


def test_an_op_that_waits_does_not_hold_up_its_engine() -> None:
    """Stream b's copy is issued after a's, which waits 105 us for a kernel; it runs at once."""
    timeline = Timeline()
    device = EmulatedDevice(ROUND, timeline=timeline)
    a, b, compute = device.stream("a"), device.stream("b"), device.stream("compute")
    host, slots = device.host_alloc(2000, "host"), device.alloc(2000, "slots")
    event = device.event()
    device.launch(Launch(NOTHING, work=Work(100_000)), compute)
    device.record(event, compute)
    device.wait(a, event)
    device.copy(slots.slice(0, 1000), host.slice(0, 1000), a, label="late")
    device.copy(slots.slice(1000, 1000), host.slice(1000, 1000), b, label="soon")
    assert [(s.name, s.start) for s in timeline.spans("h2d")] == [("soon", 0.0), ("late", US(105e-6))]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(0, 3)), max_size=40))
def test_an_engine_serves_one_op_at_a_time_as_early_as_it_can(ops: list[tuple[int, int, int]]) -> None:
    """Whole seconds, so that a brute-force search over all starts is the oracle."""
    engine, now = Engine(), 0
    busy: set[int] = set()
    for ready, seconds, passes in ops:
        now += passes
        ready = max(ready, now)
        start = engine.place(float(ready), float(seconds), float(now))
        wanted = next(t for t in range(ready, 10_000) if not busy & set(range(t, t + seconds)))
        if seconds:
            assert start == wanted
        busy |= set(range(int(start), int(start) + seconds))


def test_calls_take_host_time_and_ops_start_after_their_call() -> None:
    timeline = Timeline()
    device = EmulatedDevice(replace(ROUND, call_s=3e-6), timeline=timeline)
    stream = device.stream("s")
    device.launch(Launch(NOTHING), stream)
    device.launch(Launch(NOTHING), stream)
    assert device.now() == US(6e-6)
    assert [span.start for span in timeline.spans("compute")] == [US(3e-6), US(8e-6)]


def test_pageable_copies_are_slower_and_hold_the_host() -> None:
    import numpy as np

    device = EmulatedDevice(ROUND)
    stream = device.stream("s")
    plain, slots = device.host_pageable(np.zeros(5000, np.uint8), "plain"), device.alloc(5000, "slots")
    device.copy(slots, plain, stream)
    assert device.now() == US((10 + 1 + 2 * 5) * 1e-6)
    device.copy(plain, slots, stream)
    assert device.now() == US(2 * (10 + 1 + 2 * 5) * 1e-6)


def test_sockets_work_side_by_side_while_the_device_works() -> None:
    timeline = Timeline()
    device = EmulatedDevice(ROUND, timeline=timeline)
    stream = device.stream("s")
    device.launch(Launch(NOTHING, work=Work(45_000), label="hits"), stream)
    device.host_work({"socket 0": 30e-6, "socket 1": 40e-6}, "misses")
    device.sync()
    assert device.now() == US(50e-6)
    assert [span.name for span in timeline.spans("host")] == ["sync s"]
    assert timeline.spans("host")[0].start == US(40e-6)
    for lane, seconds in (("socket 0", 30e-6), ("socket 1", 40e-6)):
        assert overlap_seconds(timeline.spans(lane), timeline.spans("compute")) == US(seconds)


def test_work_on_a_lane_that_goes_on_beside_the_thread() -> None:
    device = EmulatedDevice(ROUND)
    end = device.clock.begin("disk", 30e-6, "read")
    assert device.clock.begin("disk", 10e-6, "read") == US(40e-6)
    assert device.now() == 0.0
    device.clock.wait_until(end, "disk")
    assert device.now() == US(30e-6)
    with pytest.raises(ValueError, match="takes -1"):
        device.clock.begin("disk", -1.0, "read")


def test_copies_between_host_buffers_take_the_threads_time() -> None:
    device = EmulatedDevice(ROUND)
    first, second = device.host_alloc(4000, "a"), device.host_alloc(4000, "b")
    device.host_write(first)[:] = 3
    device.host_copy(second, first)
    assert device.now() == US(4e-6)
    assert device.host_read(second).tolist() == [3] * 4000


def test_times_are_asked_of_events_that_have_them() -> None:
    device = EmulatedDevice(ROUND)
    stream, start, plain = device.stream("s"), device.event(timing=True), device.event()
    with pytest.raises(EventError, match="before it was recorded"):
        device.elapsed_ms(start, start)
    device.fill(device.alloc(10, "x"), 0, stream)
    device.record(start, stream)
    device.record(plain, stream)
    with pytest.raises(EventError, match="not known to be reached"):
        device.elapsed_ms(start, start)
    device.sync()
    assert device.elapsed_ms(start, start) == 0.0
    with pytest.raises(EventError, match="without timing"):
        device.elapsed_ms(start, plain)


@pytest.mark.parametrize("call", ["wait", "sync", "query"])
def test_an_event_is_recorded_before_it_is_used(call: str) -> None:
    device = EmulatedDevice(ROUND)
    stream, event = device.stream("s"), device.event()
    with pytest.raises(EventError, match="before it was recorded"):
        device.wait(stream, event) if call == "wait" else getattr(device, call)(event)


def test_nonsense_is_no_figure() -> None:
    with pytest.raises(HardwareError, match="is no link"):
        LinkFigures(bytes_per_s=0.0, latency_s=0.0, handshake_s=0.0)
    with pytest.raises(HardwareError, match="macs_per_s is 0"):
        replace(ROUND, macs_per_s=0.0)
    assert isinstance(replace(ROUND, call_s=0.0), DeviceFigures)


def test_the_timeline_has_no_two_ops_of_one_engine_at_once() -> None:
    for seed in range(5):
        timeline = Timeline()
        device = EmulatedDevice(ROUND, seed=seed, timeline=timeline)
        streams = [device.stream(f"s{i}") for i in range(3)]
        host, slots = device.host_alloc(3000, "host"), device.alloc(3000, "slots")
        for i in range(30):
            part = (i % 3) * 1000, 1000
            device.copy(slots.slice(*part), host.slice(*part), streams[i % 3])
            device.launch(Launch(NOTHING, writes=(slots.slice(*part),), work=Work(i * 100)), streams[i % 3])
        device.sync()
        for lane in timeline.lanes:
            spans = timeline.spans(lane)
            pairs = itertools.pairwise(spans)
            assert all(first.end <= second.start + 1e-12 for first, second in pairs)
