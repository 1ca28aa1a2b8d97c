"""Belady's rule against an exhaustive search over everything that any policy could do."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.policies import POLICIES, PolicyFactory
from strata.memory.policies.belady import BeladyPolicy, Future

SPACE = ExpertSpace((6,))
steps = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
traces = st.lists(steps, min_size=1, max_size=9)


def hits_of(trace: list[list[int]], slots: int, policy: PolicyFactory) -> int:
    experts = ExpertCache(SPACE, slots, policy)
    for chosen in trace:
        experts.begin_step()
        for handle in experts.acquire(0, chosen).handles:
            experts.release(handle)
        for claim in experts.admit_misses():
            experts.loaded(claim)
    return experts.statistics.hits


def best_hits(trace: list[list[int]], slots: int) -> int:
    """After each step any of what was there and what was just used may stay."""

    @cache
    def best(step: int, there: frozenset[int]) -> int:
        if step == len(trace):
            return 0
        chosen = frozenset(trace[step])
        union = sorted(there | chosen)
        size = min(slots, len(union))
        return len(there & chosen) + max(
            best(step + 1, frozenset(kept)) for kept in combinations(union, size)
        )

    return best(0, frozenset())


@given(trace=traces, slots=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_no_choice_has_more_hits(trace: list[list[int]], slots: int) -> None:
    future = Future((0, chosen) for chosen in trace)
    found = hits_of(trace, slots, lambda space, count: BeladyPolicy(future))
    assert found == best_hits(trace, slots)
    for policy in POLICIES.values():
        assert hits_of(trace, slots, policy) <= found
