"""Faults that other engines had in this place, retold: ../shared/cases/bugs, area "expert cache"."""

from __future__ import annotations

import random

import pytest

from strata.core import ExpertId
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim, Refusal
from strata.memory.experts import ExpertSpace
from strata.memory.policies import POLICIES

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def decode(cache: ExpertCache, steps: int, seed: int) -> float:
    """A request that favours some experts: its hit rate over these steps."""
    chooser = random.Random(seed)
    before = cache.statistics.hits
    for _ in range(steps):
        cache.begin_step()
        chosen = {min(int(chooser.expovariate(0.25)), 63) for _ in range(6)}
        for handle in cache.acquire(0, sorted(chosen)).handles:
            cache.release(handle)
        for claim in cache.admit_misses():
            cache.loaded(claim)
    return (cache.statistics.hits - before) / steps


@every_policy
def test_case_41_a_prompt_larger_than_the_cache_leaves_decode_alone(policy: str) -> None:
    """600 tokens that touch all 64 experts, 12 slots: decode of another request loses not a single hit."""
    quiet, disturbed = (ExpertCache(ExpertSpace((64,)), 12, POLICIES[policy]) for _ in range(2))
    assert decode(quiet, 200, seed=1) == decode(disturbed, 200, seed=1)
    chunk = disturbed.acquire(0, [row % 64 for row in range(600 * 8)], prefill=True)
    for handle in chunk.handles:
        disturbed.release(handle)
    assert decode(disturbed, 200, seed=2) == decode(quiet, 200, seed=2)
    assert disturbed.statistics.evictions == quiet.statistics.evictions


@every_policy
def test_case_41_every_expert_of_a_prompt_is_answered_once(policy: str) -> None:
    """No budget of decode applies: all 64 are hits or misses, each once per layer and chunk."""
    cache = ExpertCache(ExpertSpace((64,)), 12, POLICIES[policy], inserts_per_step=1)
    decode(cache, 50, seed=1)
    chunk = cache.acquire(0, [row * 7 % 64 for row in range(600 * 8)], prefill=True)
    answered = [handle.expert.index for handle in chunk.hits] + [miss.index for miss in chunk.misses]
    assert sorted(answered) == list(range(64))
    assert cache.statistics.prefill_hits + cache.statistics.prefill_misses == 64


@every_policy
def test_case_42_a_slot_in_flight_or_held_is_never_taken(policy: str) -> None:
    cache = ExpertCache(ExpertSpace((8,)), 2, POLICIES[policy])
    first = cache.admit(ExpertId(0, 0), insist=True)
    second = cache.admit(ExpertId(0, 1), insist=True)
    assert isinstance(first, Claim)
    assert isinstance(second, Claim)
    assert cache.admit(ExpertId(0, 2), insist=True) is Refusal.OCCUPIED
    cache.loaded(first)
    handle = cache.hold(ExpertId(0, 0))
    assert handle
    assert cache.admit(ExpertId(0, 2), insist=True) is Refusal.OCCUPIED
    cache.abandon(second)
    third = cache.admit(ExpertId(0, 2), insist=True)
    assert isinstance(third, Claim)
    assert third.slot == second.slot
    with pytest.raises(ValueError, match="does not stand"):
        cache.loaded(second)  # the cancelled copy reports late: the slot is somebody else's now
    cache.check_integrity()


@pytest.mark.slow
@every_policy
def test_case_42_no_slot_ever_holds_another_expert_than_its_index_says(policy: str) -> None:
    """Slow loads that end out of order or are cancelled; the memory of every slot is compared at each hit."""
    chooser = random.Random(42)
    space = ExpertSpace((16, 16, 16))
    cache = ExpertCache(space, 10, POLICIES[policy], inserts_per_step=4)
    memory: dict[int, ExpertId] = {}
    flying: list[Claim] = []
    for _ in range(5_000):
        cache.begin_step()
        for layer in range(3):
            got = cache.acquire(layer, chooser.sample(range(16), 4))
            for handle in got.hits:
                assert memory[handle.slot] == handle.expert
            for handle in got.handles:
                cache.release(handle)
        flying += cache.admit_misses()
        for claim in flying[len(flying) // 2 :]:
            memory[claim.slot] = ExpertId(-1, -1)
        chooser.shuffle(flying)
        while len(flying) > 6 or (flying and chooser.random() < 0.5):
            claim = flying.pop()
            if chooser.random() < 0.2:
                cache.abandon(claim)
            else:
                memory[claim.slot] = claim.expert
                cache.loaded(claim)
    cache.check_integrity()
    assert cache.statistics.evictions > 1_000
    assert cache.statistics.abandoned > 500
