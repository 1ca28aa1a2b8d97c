"""Made-up routing: what real routers do and what would defeat a policy.

A trace is a list of steps; a step is a list of (layer, experts).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.policies import PolicyFactory

Trace = list[list[tuple[int, Sequence[int]]]]


def zipf(count: int, power: float = 1.0) -> list[float]:
    """Weights of a long-tailed popularity."""
    return [1 / (rank + 1) ** power for rank in range(count)]


def choose(chooser: random.Random, order: list[int], weights: list[float], count: int) -> list[int]:
    """Distinct experts by popularity (Efraimidis and Spirakis: the largest u ** (1 / w))."""
    keys = [chooser.random() ** (1 / weight) for weight in weights]
    return [order[place] for place in sorted(range(len(keys)), key=lambda i: -keys[i])[:count]]


def stationary(seed: int, steps: int = 2000) -> Trace:
    """64 experts, top-8, popularity that never changes."""
    chooser = random.Random(seed)
    order = chooser.sample(range(64), 64)
    return [[(0, choose(chooser, order, zipf(64), 8))] for _ in range(steps)]


def drift(seed: int, steps: int = 2000) -> Trace:
    """Popularity wanders: two neighbours in its order change places at every step."""
    chooser = random.Random(seed)
    order = chooser.sample(range(64), 64)
    trace: Trace = []
    for _ in range(steps):
        for _ in range(4):
            place = chooser.randrange(63)
            order[place], order[place + 1] = order[place + 1], order[place]
        trace.append([(0, choose(chooser, order, zipf(64), 8))])
    return trace


def phases(seed: int, steps: int = 2000) -> Trace:
    """Another popularity every 200 steps, as when the topic changes."""
    chooser = random.Random(seed)
    trace: Trace = []
    for step in range(steps):
        if step % 200 == 0:
            order = chooser.sample(range(64), 64)
        trace.append([(0, choose(chooser, order, zipf(64), 8))])
    return trace


def loops(seed: int, steps: int = 1500) -> Trace:
    """All 128 experts in turn, 4 a step, with one chosen at random: what defeats LRU."""
    chooser = random.Random(seed)
    trace: Trace = []
    for step in range(steps):
        base = 3 * step
        extra = (base + 64 + chooser.randrange(32)) % 128
        trace.append([(0, [base % 128, (base + 1) % 128, (base + 2) % 128, extra])])
    return trace


def hit_rate(
    policy: PolicyFactory, trace: Trace, slots: int, *, seed_shares: NDArray[np.float64] | None = None
) -> float:
    """Of a cache over all layers of the trace that admits what each step missed."""
    layers = 1 + max(layer for step in trace for layer, _ in step)
    width = 1 + max(max(chosen) for step in trace for _, chosen in step)
    cache = ExpertCache(ExpertSpace((width,) * layers), slots, policy)
    if seed_shares is not None:
        cache.policy.seed(0, seed_shares)
    for step in trace:
        cache.begin_step()
        for layer, chosen in step:
            for handle in cache.acquire(layer, chosen).handles:
                cache.release(handle)
        for claim in cache.admit_misses():
            cache.loaded(claim)
    cache.check_integrity()
    return cache.statistics.hit_rate
