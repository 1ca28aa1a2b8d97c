"""Replaying a trace through the expert cache under several policies, always beside Belady's bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.policies import POLICIES, PolicyFactory
from strata.memory.policies.base import Policy
from strata.memory.policies.belady import BeladyPolicy, Future
from strata.memory.trace import TraceSource
from strata.memory.trace_format import Access

BELADY = "belady"


@dataclass(frozen=True)
class ReplayOptions:
    """inserts_per_step: bound, None = none. admit_all: what is missed is always admitted (eviction alone)."""

    inserts_per_step: int | None = None
    admit_all: bool = False


@dataclass(frozen=True)
class ReplayResult:
    """What a policy made of a trace. accesses: chosen experts of decode; prefill is counted apart.

    bytes: moved into slots, 0 where the trace does not know the size of its experts. bound: hits of Belady's
    rule with as many slots.
    """

    policy: str
    slots: int
    accesses: int
    hits: int
    inserts: int
    evictions: int
    bytes: int
    bound: int

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0 for a trace without decode."""
        return self.hits / max(self.accesses, 1)

    @property
    def share_of_bound(self) -> float:
        """Hits per hit of Belady's rule; 1 where that has none either."""
        return self.hits / self.bound if self.bound else 1.0


def replay_all(
    trace: TraceSource,
    slots: Sequence[int],
    policies: Iterable[str],
    options: ReplayOptions = ReplayOptions(),
) -> Iterator[ReplayResult]:
    """Every policy with every number of slots; Belady's bound comes last of each number.

    Every cache begins empty and goes through the whole trace: nothing is reset between requests. At the end
    of a step (the accesses of one sequence and step over all layers) what was missed is offered to the cache,
    and is there in the next step. Under a bound on inserts, Belady's rule is a good choice, but no longer
    proved to be the best.
    """
    future = Future((access.layer, access.experts) for access in trace if not access.prefill)

    def belady(space: ExpertSpace, count: int) -> Policy:
        return BeladyPolicy(future)

    for count in slots:
        bound = _replay(trace, count, belady, ReplayOptions(options.inserts_per_step))
        best = bound.statistics.hits
        for name in policies:
            yield _result(name, _replay(trace, count, POLICIES[name], options), trace, best)
        yield _result(BELADY, bound, trace, best)


def _replay(trace: TraceSource, slots: int, policy: PolicyFactory, options: ReplayOptions) -> ExpertCache:
    cache = ExpertCache(trace.header.space, slots, policy, inserts_per_step=options.inserts_per_step)
    for _, step in groupby(trace, key=lambda access: (access.sequence, access.step)):
        cache.begin_step()
        _step(cache, step, options.admit_all)
    cache.check_integrity()
    return cache


def _step(cache: ExpertCache, step: Iterable[Access], admit_all: bool) -> None:
    """The handles of a step are released before its misses are admitted: experts of this step may go, too."""
    for access in step:
        for handle in cache.acquire(access.layer, access.experts, prefill=access.prefill).handles:
            cache.release(handle)
    for claim in cache.admit_misses(choosy=not admit_all):
        cache.loaded(claim)


def _result(name: str, cache: ExpertCache, trace: TraceSource, bound: int) -> ReplayResult:
    statistics = cache.statistics
    sizes = trace.header.expert_bytes
    return ReplayResult(
        policy=name,
        slots=cache.slots,
        accesses=statistics.hits + statistics.misses,
        hits=statistics.hits,
        inserts=statistics.inserts,
        evictions=statistics.evictions,
        bytes=sum(size * count for size, count in zip(sizes, statistics.layer_inserts, strict=False)),
        bound=bound,
    )
