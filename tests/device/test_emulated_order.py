"""The order in which the emulated device moves data: legal for every seed, and every legal one comes up."""

from __future__ import annotations

import random

import numpy as np
import pytest
from device_figures import ROUND
from programs import STREAMS, Machine, Oracle, random_program

from strata.device.base import Copy, Launch
from strata.device.emulated import EmulatedDevice
from strata.device.python_kernel import PythonKernel


@pytest.mark.parametrize("adversarial", [False, True])
def test_ops_run_after_what_precedes_them_and_before_the_host_relies_on_them(adversarial: bool) -> None:
    for number in range(150):
        program = random_program(random.Random(number), 60)
        machine, oracle = Machine(number if adversarial else None), Oracle()
        for step in [*program, ("sync_all",)]:
            oracle.apply(step)
            machine.step(step, touch=False)
            assert oracle.host <= set(machine.log), "an op that the host knows to be finished has not run"
        assert sorted(machine.log) == list(range(machine.count)), "every op runs once"
        place = {op: index for index, op in enumerate(machine.log)}
        for op, before in enumerate(oracle.before):
            assert all(place[earlier] < place[op] for earlier in before)
        assert machine.device.schedule.pending == 0


def test_every_legal_order_of_a_small_program_comes_up() -> None:
    """Streams with 2, 2 and 1 ops: 5! / (2! 2! 1!) = 30 orders; each of 3,000 seeds gives one."""
    orders = set()
    for seed in range(3000):
        machine = Machine(seed)
        for stream in (0, 0, 1, 1, 2):
            machine.step(("op", stream, [], []))
        machine.step(("sync_all",))
        orders.add(tuple(machine.log))
    assert len(orders) == 30


def test_ops_that_nobody_waits_for_run_early_under_some_seeds_and_late_under_others() -> None:
    ran = []
    for seed in range(40):
        machine = Machine(seed)
        for stream in range(STREAMS):
            machine.step(("op", stream, [], []))
        machine.step(("sync_stream", 0))
        ran.append(len(machine.log))
    assert min(ran) == 1
    assert max(ran) == STREAMS


def test_copies_of_a_batch_run_in_any_order() -> None:
    """Seen through a kernel's eyes that is impossible; the shuffle itself is asked."""
    device = EmulatedDevice(ROUND, seed=5)
    orders = set()
    for _ in range(200):
        moved: list[int] = []
        moves = [lambda n=n, moved=moved: moved.append(n) for n in range(3)]
        device.schedule.shuffle(moves)
        for move in moves:
            move()
        orders.add(tuple(moved))
    assert len(orders) == 6


def test_a_batch_moves_every_copy() -> None:
    for seed in (None, 1, 2):
        device = EmulatedDevice(ROUND, seed=seed)
        stream = device.stream("fetch")
        source, slots, out = device.host_alloc(30, "a"), device.alloc(30, "b"), device.host_alloc(30, "c")
        device.host_write(source)[:] = np.arange(30)
        parts = [(0, 10), (20, 10), (10, 10)]
        device.copy_batch([Copy(slots.slice(*p), source.slice(*p)) for p in parts], stream)
        device.copy(out, slots, stream)
        device.sync(stream)
        assert device.host_read(out).tolist() == list(range(30))


def test_a_query_says_yes_in_the_end_and_before_that_it_may_lie_about_the_time() -> None:
    answers = []
    for seed in range(60):
        device = EmulatedDevice(ROUND, seed=seed)
        stream, event = device.stream("s"), device.event()
        ran: list[int] = []
        kernel = PythonKernel("k", lambda reads, writes, ran=ran: ran.append(1))
        device.launch(Launch(kernel), stream)
        device.record(event, stream)
        early = device.query(event)
        device.host_work({"host": 1.0})
        late = 0
        while not device.query(event):
            late += 1
        assert ran == [1], "after a yes the op has run"
        assert late <= 3
        answers.append((early, late))
    assert any(early for early, _ in answers)
    assert any(late for _, late in answers)
    assert any(not early and not late for early, late in answers)
    plain = EmulatedDevice(ROUND)
    stream, event = plain.stream("s"), plain.event()
    plain.fill(plain.alloc(16, "x"), 0, stream)
    plain.record(event, stream)
    assert not plain.query(event)
    plain.host_work({"host": 1.0})
    assert plain.query(event)


def test_waits_that_order_nothing_new_are_counted() -> None:
    device = EmulatedDevice(ROUND)
    first, second, event = device.stream("a"), device.stream("b"), device.event()
    device.fill(device.alloc(16, "x"), 0, first)
    device.record(event, first)
    device.wait(second, event)
    assert device.order.redundant_waits == 0
    device.wait(second, event)
    device.wait(first, event)
    assert device.order.redundant_waits == 2


def test_streams_made_late_take_part() -> None:
    for seed in range(10):
        device = EmulatedDevice(ROUND, seed=seed)
        first, event = device.stream("a"), device.event()
        log: list[str] = []
        device.launch(Launch(PythonKernel("one", lambda reads, writes, log=log: log.append("one"))), first)
        device.record(event, first)
        second = device.stream("b")
        device.wait(second, event)
        device.launch(Launch(PythonKernel("two", lambda reads, writes, log=log: log.append("two"))), second)
        device.sync(second)
        assert log == ["one", "two"]
