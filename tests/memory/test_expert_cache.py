"""The expert cache: no lost slot, no evicted expert in a hit, nothing in use evicted, whatever the order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.core import ExpertId
from strata.errors import CapacityError
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim, Handle, Refusal, SlotState
from strata.memory.experts import ExpertSpace
from strata.memory.policies import POLICIES, LruPolicy

SPACE = ExpertSpace((4, 0, 5, 3))
EXPERTS = list(SPACE)
POISON = ExpertId(-1, -1)
experts = st.sampled_from(EXPERTS)


class CacheMachine(RuleBasedStateMachine):
    """A plain model beside the cache: what each slot's memory holds, who is loading, who is held."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        slots=st.integers(0, 8),
        budget=st.sampled_from([None, 0, 1, 3]),
    )
    def start(self, policy: str, slots: int, budget: int | None) -> None:
        self.cache = ExpertCache(SPACE, slots, POLICIES[policy], inserts_per_step=budget)
        self.budget = budget
        self.inserted = 0
        self.memory: list[ExpertId] = [POISON] * slots
        self.loading: dict[ExpertId, Claim] = {}
        self.resident: dict[ExpertId, int] = {}
        self.handles: list[Handle] = []
        self.seen = [0, 0]  # decode hits and misses

    def held(self, expert: ExpertId) -> bool:
        return any(handle.expert == expert for handle in self.handles)

    @rule()
    def begin_step(self) -> None:
        self.cache.begin_step()
        self.inserted = 0

    @rule(
        layer=st.sampled_from([0, 2, 3]),
        chosen=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        prefill=st.booleans(),
    )
    def acquire(self, layer: int, chosen: list[int], prefill: bool) -> None:
        got = self.cache.acquire(layer, chosen, prefill=prefill)
        asked = {ExpertId(layer, index) for index in chosen}
        for handle in got.hits:
            assert self.memory[handle.slot] == handle.expert, "a hit must be what its slot holds"
            assert self.resident[handle.expert] == handle.slot
        assert {handle.expert for handle in got.loading} == asked & set(self.loading)
        assert set(got.misses) == asked - set(self.resident) - set(self.loading)
        assert len(got.handles) + len(got.misses) == len(asked)
        self.handles += got.handles
        if not prefill:
            self.seen[0] += len(got.hits)
            self.seen[1] += len(got.loading) + len(got.misses)

    @rule(expert=experts)
    def hold(self, expert: ExpertId) -> None:
        handle = self.cache.hold(expert)
        assert (handle is not None) == (expert in self.resident or expert in self.loading)
        self.handles += [handle] if handle else []

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.cache.release(handle)
        with pytest.raises(ValueError, match="released twice"):
            self.cache.release(handle)

    @rule(expert=experts, insist=st.booleans())
    def admit(self, expert: ExpertId, insist: bool) -> None:
        present = expert in self.resident or expert in self.loading
        spent = self.budget is not None and self.inserted >= self.budget and not insist
        free = self.cache.count(SlotState.FREE)
        stuck = not free and all(self.held(one) for one in self.resident)
        answer = self.cache.admit(expert, insist=insist)
        if present:
            assert answer is Refusal.PRESENT
        elif spent:
            assert answer is Refusal.BUDGET
        elif stuck:
            assert answer is Refusal.OCCUPIED
        elif insist or free:
            assert isinstance(answer, Claim)
        if isinstance(answer, Claim):
            self.claimed(answer)

    @rule()
    def admit_misses(self) -> None:
        for claim in self.cache.admit_misses():
            self.claimed(claim)

    def claimed(self, claim: Claim) -> None:
        self.inserted += 1
        if claim.evicted is not None:
            assert not self.held(claim.evicted), "an expert in use was evicted"
            assert self.resident.pop(claim.evicted) == claim.slot
        assert claim.slot not in self.resident.values()
        assert claim.slot not in [other.slot for other in self.loading.values()], "two writers of one slot"
        self.memory[claim.slot] = POISON
        self.loading[claim.expert] = claim

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        claim = self.loading.pop(data.draw(st.sampled_from(sorted(self.loading))))
        self.memory[claim.slot] = claim.expert
        self.cache.loaded(claim)
        self.resident[claim.expert] = claim.slot
        with pytest.raises(ValueError, match="does not stand"):
            self.cache.loaded(claim)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        claim = self.loading[data.draw(st.sampled_from(sorted(self.loading)))]
        if self.held(claim.expert):
            with pytest.raises(ValueError, match="handles"):
                self.cache.abandon(claim)
            return
        self.cache.abandon(claim)
        del self.loading[claim.expert]

    @rule(slots=st.integers(0, 8))
    def resize(self, slots: int) -> None:
        before = self.cache.slots
        busy = [claim.slot for claim in self.loading.values()] + [handle.slot for handle in self.handles]
        if any(slot >= slots for slot in busy):
            with pytest.raises(CapacityError, match=f"shrink to {slots} slots"):
                self.cache.resize(slots)
            assert self.cache.slots == before
            slots = self.cache.smallest
            assert slots == max(busy) + 1
        given = self.cache.resize(slots)
        assert list(given) == list(range(slots, before))
        assert self.cache.slots == slots
        self.memory = (self.memory + [POISON] * 8)[:slots]
        self.resident = {expert: slot for expert, slot in self.resident.items() if slot < slots}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.cache.check_integrity()
        for expert in EXPERTS:
            assert self.cache.slot_of(expert) == self.resident.get(expert)
        assert self.cache.count(SlotState.LOADING) == len(self.loading)
        assert self.cache.count(SlotState.RESIDENT) == len(self.resident)
        assert [self.cache.statistics.hits, self.cache.statistics.misses] == self.seen


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def make(slots: int, policy: str = "lru", **options: int) -> ExpertCache:
    return ExpertCache(ExpertSpace((8, 8)), slots, POLICIES[policy], **options)


def fill(cache: ExpertCache, *ids: ExpertId) -> None:
    for expert in ids:
        claim = cache.admit(expert, insist=True)
        assert isinstance(claim, Claim)
        cache.loaded(claim)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_as_many_slots_as_a_router_chooses_are_enough(policy: str) -> None:
    """Fetching every miss of every layer: the held hits never leave too little room for the misses."""
    cache = make(3, policy)
    for step in range(200):
        cache.begin_step()
        for layer in (0, 1):
            got = cache.acquire(layer, [step % 8, (3 * step + layer) % 8, (5 * step + 1) % 8])
            for expert in got.misses:
                claim = cache.admit(expert, insist=True)
                assert isinstance(claim, Claim), f"step {step}: {claim}"
                cache.loaded(claim)
                handle = cache.hold(expert)
                assert handle
                got.hits.append(handle)
            for handle in got.handles:
                cache.release(handle)
    cache.check_integrity()


def test_inserts_of_a_step_are_bounded() -> None:
    cache = make(8, inserts_per_step=2)
    cache.acquire(0, [0, 1, 2, 3])
    assert len(cache.admit_misses()) == 2
    assert cache.admit(ExpertId(1, 0)) is Refusal.BUDGET
    assert isinstance(cache.admit(ExpertId(1, 0), insist=True), Claim), "what is fetched in any case"
    cache.begin_step()
    assert cache.admit_misses() == [], "what an earlier step missed is not offered again"
    assert isinstance(cache.admit(ExpertId(1, 1)), Claim)
    assert cache.statistics.refused == {Refusal.BUDGET: 2}


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_all_layers_get_their_turn_when_inserts_are_few(policy: str) -> None:
    """With one insert per step and misses in eight layers, eight steps later each layer has had one."""
    cache = ExpertCache(ExpertSpace((4,) * 8), 8, POLICIES[policy], inserts_per_step=1)
    for step in range(16):
        cache.begin_step()
        for layer in range(8):
            for handle in cache.acquire(layer, [step % 4]).handles:
                cache.release(handle)
        for claim in cache.admit_misses():
            cache.loaded(claim)
    assert all(1 <= count <= 3 for count in cache.statistics.layer_inserts), cache.statistics.layer_inserts


class Choosy(LruPolicy):
    """Would rather keep whatever is there."""

    def admits(self, candidate: ExpertId, victim: ExpertId) -> bool:
        return False


def test_admission_is_a_question_apart_from_eviction() -> None:
    cache = ExpertCache(ExpertSpace((8,)), 2, Choosy)
    cache.acquire(0, [0, 1, 2])
    for claim in cache.admit_misses():
        cache.loaded(claim)
    assert [cache.slot_of(ExpertId(0, index)) for index in range(3)] == [0, 1, None], (
        "free slots need no leave"
    )
    assert cache.admit(ExpertId(0, 2)) is Refusal.WORTH
    claim = cache.admit(ExpertId(0, 2), insist=True)
    assert isinstance(claim, Claim)
    assert claim.evicted == ExpertId(0, 0)
    assert cache.statistics.refused == {Refusal.OCCUPIED: 1, Refusal.WORTH: 1}


def test_an_expert_that_the_model_has_not_is_refused() -> None:
    cache = make(2)
    for call in (lambda: cache.acquire(0, [8]), lambda: cache.admit(ExpertId(2, 0))):
        with pytest.raises(ValueError, match="the model has no"):
            call()
    assert not cache.statistics.misses


def test_shrinking_is_refused_below_what_is_held() -> None:
    cache = make(4)
    fill(cache, *(ExpertId(0, index) for index in range(4)))
    handle = cache.hold(ExpertId(0, 2))
    assert handle
    assert cache.smallest == 3
    with pytest.raises(CapacityError, match=r"shrink to 1 slots, but slot 2 is held\n.*shrink to 3"):
        cache.resize(1)
    assert cache.resize(3) == range(3, 4)
    cache.release(handle)
    assert cache.resize(1) == range(1, 3)
    assert [cache.slot_of(ExpertId(0, index)) for index in range(4)] == [0, None, None, None]
    assert not cache.resize(2), "growing gives nothing away"
    assert cache.statistics.evictions == 3


@pytest.mark.parametrize("damage", ["two slots", "lost slot", "negative handles", "stale index"])
def test_integrity_check_sees_damage(damage: str) -> None:
    cache = make(3)
    fill(cache, ExpertId(0, 0), ExpertId(0, 1))
    cache.check_integrity()
    if damage == "two slots":
        cache._slots[1].expert = ExpertId(0, 0)
    elif damage == "lost slot":
        cache._free.clear()
    elif damage == "negative handles":
        cache._slots[0].handles = -1
    else:
        cache._where[ExpertId(1, 1)] = 2
    with pytest.raises(AssertionError):
        cache.check_integrity()
