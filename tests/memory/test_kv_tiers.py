"""KV pages on two tiers: every request reads its own text, whatever moves, shares, ends or waits."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from device_figures import ROUND
from dropped_waits import DroppingDevice
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tiered import DeviceMachine, PlainMachine, Tiered

from strata.core import FinishReason
from strata.device.base import Copy, RaceError
from strata.device.emulated import EmulatedDevice
from strata.errors import CapacityError, ContextOverflowError
from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.kv_mover import KvMover
from strata.memory.policies.lru import LruPolicy
from strata.memory.transfer import Priority, Transfer

texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class TiersMachine(RuleBasedStateMachine):
    """Requests come, compute in steps of the real scheduler, and go."""

    @initialize(
        device=st.integers(3, 9),
        host=st.integers(1, 9),
        reserve=st.integers(0, 4),
        seed=st.integers(0, 1 << 16),
        chunk=st.integers(1, 12),
    )
    def start(self, device: int, host: int, reserve: int, seed: int, chunk: int) -> None:
        machine = PlainMachine(device, host, random.Random(seed))
        self.tiered = Tiered(machine, device, host, reserve, chunk=chunk)

    @rule(prompt=texts, answer=st.integers(1, 16))
    def add(self, prompt: list[int], answer: int) -> None:
        pages = -(-(len(prompt) + answer) // 4)
        if pages > self.tiered.scheduler.most_pages:
            with pytest.raises(CapacityError, match=f"may need {pages} KV pages"):
                self.tiered.add(prompt, answer)
        else:
            self.tiered.add(prompt, answer)

    @rule(prompt=st.integers(40, 50))
    def add_too_long(self, prompt: int) -> None:
        with pytest.raises(ContextOverflowError):
            self.tiered.add([0] * prompt, 1)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def step(self, tokens: list[int]) -> None:
        for token in tokens:
            waits = bool(self.tiered.requests)
            assert bool(self.tiered.step(token)) == waits

    @precondition(lambda self: self.tiered.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        self.tiered.end(data.draw(st.sampled_from(self.tiered.requests)), reason)
        self.tiered.pages.check_integrity()
        self.tiered.tiers.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "tiered"):
            self.tiered.finish()


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def random_traffic(tiered: Tiered, rng: random.Random, steps: int) -> None:
    """Prompts that begin alike, aborts and failures; then everybody comes to an end."""
    for _ in range(steps):
        if rng.random() < 0.7 and len(tiered.requests) < 4:
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
            with contextlib.suppress(CapacityError):
                tiered.add(prompt, rng.randint(1, 8))
        if tiered.requests and rng.random() < 0.06:
            reason = rng.choice([FinishReason.ABORT, FinishReason.ERROR])
            tiered.end(rng.choice(tiered.requests), reason)
        tiered.step(rng.randint(0, 1))
    tiered.finish()


def on_device(device: Any, rng: random.Random, steps: int) -> Tiered:
    """Traffic over a region that has expert slots at times."""
    places, pool = rng.randint(3, 5), rng.randint(2, 6)
    slots = rng.choice((0, 0, 1, 2))
    cache = ExpertCache(ExpertSpace((slots,)), slots, LruPolicy) if slots else None
    machine = DeviceMachine(device, places, pool, rng, cache)
    most = machine.region.sizes.pages_beside(min(slots, 1))
    tiered = Tiered(
        machine, places, pool, rng.randint(0, 3), most_places=most, chunk=rng.randint(2, 12), max_running=4
    )
    random_traffic(tiered, rng, steps)
    for _ in range(20):  # news of what has ended may come late
        if machine.region.slots < slots:
            device.host_work({"host": 1e-2})
            tiered.step()
    machine.queue.check_integrity()
    machine.region.check_integrity()
    assert machine.region.slots == slots, "expert slots were not given back"
    return tiered


def test_a_thousand_random_schedules_move_no_wrong_byte() -> None:
    out = back = preempted = 0
    for seed in range(1000):
        device = EmulatedDevice(ROUND, seed=seed)
        tiered = on_device(device, random.Random(seed), 4)
        out += tiered.tiers.statistics.out
        back += tiered.tiers.statistics.back
        preempted += tiered.scheduler.preempted
        device.close()
    assert min(out, back, preempted) > 100, "the cases are too easy"


class Forgetful(KvMover):
    """Leaves out one kind of wait: "after": a move's for the steps before it, "order": a step's for moves,
    "quiet": the question whether the device has done with pages."""

    left_out = ""

    def move(self, device: int, host: int, outward: bool) -> Transfer:
        move = super().move(device, host, outward)
        if self.left_out == f"after {move.direction}":
            move.after = ()
        return move

    def order(self, move: Transfer) -> None:
        if self.left_out != f"order {move.direction}":
            super().order(move)

    def is_quiet(self) -> bool:
        return self.left_out == "quiet" or super().is_quiet()


def run_forgetful(left_out: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What came of traffic without one kind of wait."""
    monkeypatch.setattr("tiered.KvMover", Forgetful)
    monkeypatch.setattr(Forgetful, "left_out", left_out)
    try:
        on_device(EmulatedDevice(ROUND, seed=seed), random.Random(seed), 12)
    except RaceError:
        return "race"
    return "right"


def test_waits_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {run_forgetful("", seed, monkeypatch) for seed in range(1, 20)} == {"right"}


@pytest.mark.parametrize("left_out", ["after h2d", "after d2h", "order h2d"])
def test_no_kind_of_wait_can_be_left_out(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(run_forgetful(left_out, seed, monkeypatch) == "race" for seed in range(1, 60))


def call_back(left_out: str, monkeypatch: pytest.MonkeyPatch) -> Tiered:
    """A request that loses its seat and gets it again while its pages are still on their way out."""
    monkeypatch.setattr("tiered.KvMover", Forgetful)
    monkeypatch.setattr(Forgetful, "left_out", left_out)
    tiered = Tiered(DeviceMachine(EmulatedDevice(ROUND), 4, 5, random.Random(1), None), 4, 5, reserve=4)
    request = tiered.add([0, 1, 0, 1, 0, 1], 4)
    tiered.step()
    tiered.tiers.unseat(request)
    tiered.tiers.begin_step()
    tiered.tiers.end_step()
    assert tiered.tiers.statistics.out == 2
    tiered.finish()
    return tiered


def test_a_page_that_is_called_back_is_not_written_before_its_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert call_back("", monkeypatch).tiers.statistics.back == 0
    with pytest.raises(RaceError):
        call_back("order d2h", monkeypatch)


def give_back(left_out: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """A request on borrowed places ends in the middle of its step; experts take their slots again at once.

    Steps until they could.
    """
    monkeypatch.setattr("tiered.KvMover", Forgetful)
    monkeypatch.setattr(Forgetful, "left_out", left_out)
    device, rng = EmulatedDevice(ROUND), random.Random(1)
    monkeypatch.setattr(rng, "random", lambda: 1.0)  # the host reads no result and passes no time
    cache = ExpertCache(ExpertSpace((3,)), 3, LruPolicy)
    machine = DeviceMachine(device, 3, 4, rng, cache)
    most = machine.region.sizes.pages_beside(1)
    tiered = Tiered(machine, 3, 4, reserve=0, most_places=most, chunk=24)
    request = tiered.add([0, 1] * 10, 4)
    tiered.step()
    assert machine.region.slots < 3, "the prompt has room without borrowing"
    tiered.end(request, FinishReason.ERROR)  # its pages are not kept
    record, steps = device.host_alloc(768, "record"), 0
    while machine.region.slots < 3:
        steps += 1
        assert steps < 20, "slots were not given back"
        if steps > 1:
            device.host_work({"host": 1e-3})
        tiered.step()
    for slot in (1, 2):
        machine.queue.submit([Copy(machine.region.slot(slot), record)], Priority.NOW, 0)
    machine.queue.drain()
    device.sync(machine.compute)
    return steps


def test_slots_are_not_given_back_while_the_device_uses_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert give_back("", monkeypatch) > 1
    with pytest.raises(RaceError):
        give_back("quiet", monkeypatch)


def test_places_are_not_free_before_their_moves_have_ended() -> None:
    """The host's waits: a sync that is left out shows, in most places where it orders anything."""
    noticed = useful = 0
    for seed in range(1, 12):
        device = DroppingDevice(EmulatedDevice(ROUND, seed=seed), None, ("sync",))
        on_device(device, random.Random(seed), 12)
        for dropped in device.useful:
            useful += 1
            dropping = DroppingDevice(EmulatedDevice(ROUND, seed=seed), dropped, ("sync",))
            try:
                on_device(dropping, random.Random(seed), 12)
            except RaceError:
                noticed += 1
    assert useful > 10 and noticed > useful // 2
