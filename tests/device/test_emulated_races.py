"""The race detector against an oracle, and what its errors say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from device_figures import ROUND
from programs import Machine, Oracle, random_program

from strata.device.base import Copy, Launch, RaceError
from strata.device.emulated import EmulatedDevice
from strata.device.python_kernel import PythonKernel

NOTHING = PythonKernel("nothing", lambda reads, writes: None)


def test_a_race_is_reported_exactly_where_the_oracle_sees_one() -> None:
    """Steps that race are left out of the program that goes on, and shown to race at its end."""
    races = 0
    for number in range(250):
        rng = random.Random(number)
        seed = rng.choice((None, rng.randrange(1000)))
        machine, oracle, done = Machine(seed), Oracle(), []
        for step in random_program(rng, 70):
            if not oracle.races(step):
                oracle.apply(step)
                machine.step(step)
                done.append(step)
            elif rng.random() < 0.3:
                races += 1
                replayed = Machine(seed)
                for earlier in done:
                    replayed.step(earlier)
                with pytest.raises(RaceError):
                    replayed.step(step)
        machine.device.close()
    assert races > 1000


def device_with_streams(seed: int | None = None) -> tuple[EmulatedDevice, list]:
    device = EmulatedDevice(ROUND, seed=seed)
    return device, [device.stream("fetch"), device.stream("compute")]


def test_the_error_names_both_operations_and_the_bytes() -> None:
    device, (fetch, compute) = device_with_streams()
    host, slots = device.host_alloc(64, "arena"), device.alloc(64, "slots")
    device.copy(slots.slice(16, 16), host.slice(0, 16), fetch, label="layer 3")
    with pytest.raises(RaceError) as caught:
        device.launch(Launch(NOTHING, reads=(slots,), label="layer 2"), compute)
    text = str(caught.value)
    assert "bytes [16, 32) of 'slots'" in text
    assert "the read by kernel nothing 'layer 2' (op 1 of stream 'compute')" in text
    assert "not ordered after the write by h2d copy 'layer 3' (op 1 of stream 'fetch')" in text


def test_an_event_orders_streams_and_recording_it_again_does_not_move_old_waits() -> None:
    device, (fetch, compute) = device_with_streams()
    host, slots = device.host_alloc(32, "arena"), device.alloc(32, "slots")
    event = device.event()
    device.copy(slots.slice(0, 16), host.slice(0, 16), fetch)
    device.record(event, fetch)
    device.wait(compute, event)
    device.copy(slots.slice(16, 16), host.slice(16, 16), fetch)
    device.record(event, fetch)
    device.launch(Launch(NOTHING, reads=(slots.slice(0, 16),)), compute)
    with pytest.raises(RaceError):
        device.launch(Launch(NOTHING, reads=(slots,)), compute)


@pytest.mark.parametrize("finish", ["event", "stream", "device", "query"])
def test_the_host_may_read_what_it_knows_to_be_finished(finish: str) -> None:
    device, (fetch, compute) = device_with_streams()
    source, out = device.alloc(16, "y"), device.host_alloc(16, "out")
    event = device.event()
    device.fill(source, 7, compute)
    device.copy(out, source, compute)
    device.record(event, compute)
    with pytest.raises(RaceError, match="the read by the host is not ordered after the write by d2h copy"):
        device.host_read(out)
    device.sync(fetch)
    with pytest.raises(RaceError):
        device.host_read(out)
    if finish == "query":
        assert not device.query(event)
        device.host_work({"host": 1.0})
        assert device.query(event)
    else:
        device.sync({"event": event, "stream": compute, "device": None}[finish])
    assert device.host_read(out).tolist() == [7] * 16


def test_a_pinned_source_stays_as_it_is_until_its_copy_is_done() -> None:
    device, (fetch, _) = device_with_streams(seed=1)
    source, slots = device.host_alloc(16, "staging"), device.alloc(16, "slots")
    device.host_write(source)[:] = 1
    device.copy(slots, source, fetch)
    assert device.host_read(source)[0] == 1, "reading beside a reader is no conflict"
    with pytest.raises(RaceError, match="the write by the host is not ordered after the read by h2d copy"):
        device.host_write(source)
    device.sync(fetch)
    device.host_write(source)[:] = 2


def test_a_pageable_source_may_change_after_the_call_but_its_arrival_is_not_known() -> None:
    for seed in range(20):
        device, (fetch, compute) = device_with_streams(seed)
        array = np.full(16, 1, np.uint8)
        slots, out = device.alloc(16, "slots"), device.host_alloc(16, "out")
        device.copy(slots, device.host_pageable(array, "plain"), fetch)
        array[:] = 2
        with pytest.raises(RaceError, match="pageable h2d copy"):
            device.copy(out, slots, compute)
        device.sync()
        device.copy(out, slots, compute)
        device.sync()
        assert device.host_read(out).tolist() == [1] * 16


def test_a_copy_to_pageable_memory_is_there_when_the_call_returns() -> None:
    for seed in range(20):
        device, (fetch, _) = device_with_streams(seed)
        array = np.zeros(16, np.uint8)
        plain, slots = device.host_pageable(array, "plain"), device.alloc(16, "slots")
        device.fill(slots, 9, fetch)
        device.copy(plain, slots, fetch)
        assert device.host_read(plain).tolist() == [9] * 16


def test_memory_in_use_cannot_be_freed() -> None:
    device, (fetch, _) = device_with_streams()
    source, slots = device.host_alloc(16, "arena"), device.alloc(16, "slots")
    device.copy(slots, source, fetch)
    for buffer in (source, slots):
        with pytest.raises(RaceError, match="a call of free"):
            device.free(buffer)
    device.sync()
    device.free(source)
    device.free(slots)


def test_reads_of_two_streams_do_not_conflict_but_a_later_write_must_follow_both() -> None:
    device, (fetch, compute) = device_with_streams()
    slots = device.alloc(16, "slots")
    event = device.event()
    for stream in (fetch, compute):
        device.launch(Launch(NOTHING, reads=(slots,)), stream)
    device.record(event, fetch)
    writer = device.stream("writer")
    device.wait(writer, event)
    with pytest.raises(RaceError, match="stream 'compute'"):
        device.fill(slots, 0, writer)


def test_histories_are_as_short_as_the_work_in_flight() -> None:
    """A page written token by token, read whole, over and over: nothing may pile up."""
    device, (fetch, compute) = device_with_streams()
    page, source = device.alloc(640, "page"), device.host_alloc(640, "tokens")
    shadow = page.allocation.shadow  # type: ignore[attr-defined]
    event, read = device.event(), device.event()
    for _ in range(30):
        copies = [Copy(page.slice(i * 20, 20), source.slice(i * 20, 20)) for i in range(32)]
        device.copy_batch(copies, fetch)
        device.record(event, fetch)
        device.wait(compute, event)
        assert len(shadow) <= 32
        device.sync(event)
        device.launch(Launch(NOTHING, reads=(page,)), compute)
        assert len(shadow) == 1
        device.record(read, compute)
        device.wait(fetch, read)
