"""Replaying: counts by hand on a toy, and the promise on every open trace."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from strata.memory.experts import ExpertSpace
from strata.memory.replay import ReplayOptions, ReplayResult, replay_all
from strata.memory.routes_csv import Routes, read_routes
from strata.memory.trace_format import Access, TraceHeader

OPEN_TRACES = (
    "mixtral-8x7b-fp8_humaneval2_alllayers.Mario928",
    "olmoe_gsm8k25_layer0.KaxitPandya",
    "qwen1.5-moe-gptq-int4_gsm8k25_layer0.KennethWang1221",
    "qwen1.5-moe_gsm8k25_layer0.TotaniYash",
    "qwen1.5-moe_gsm8k25_layer0.weiran0129",
    "qwen1.5-moe_gsm8k25_layer18.weiran0129",
    "qwen1.5-moe_gsm8k25_layer8.weiran0129",
)
# Points of hit rate by which forecast must beat the better of lru and lfu; measured are 0.6 and more when it
# may refuse a miss, and 0.3 and more when every policy admits all.
MARGIN = 0.002


def toy(*steps: list[tuple[int, tuple[int, ...]]], prefill: tuple[int, ...] = ()) -> Routes:
    accesses = tuple(
        Access(0, number, layer, experts, prefill=number in prefill)
        for number, step in enumerate(steps)
        for layer, experts in step
    )
    return Routes(TraceHeader("toy", ExpertSpace((4, 4)), (10, 1000)), accesses)


def by_policy(trace: Routes, slots: int, *policies: str, **options: bool) -> dict[str, ReplayResult]:
    found = replay_all(trace, [slots], policies, ReplayOptions(**options))
    return {result.policy: result for result in found}


def test_hits_inserts_evictions_and_bytes_by_hand() -> None:
    """LRU, 3 slots: a b | c d | a d | a: the last hit alone, since d has pushed a out."""
    trace = toy([(0, (0,)), (1, (1,))], [(0, (2,)), (1, (3,))], [(0, (0,)), (1, (3,))], [(0, (0,))])
    result = by_policy(trace, 3, "lru")["lru"]
    assert (result.accesses, result.hits) == (7, 2)
    assert (result.inserts, result.evictions) == (5, 2)
    assert result.bytes == 3 * 10 + 2 * 1000
    assert result.hit_rate == 2 / 7


def test_an_expert_is_there_from_the_next_step_on() -> None:
    """Both accesses of a step see what was there when it began, as when fetches run in the background."""
    assert by_policy(toy([(0, (1,)), (0, (1,))]), 4, "lru")["lru"].hits == 0


def test_prefill_is_left_out() -> None:
    plain = toy([(0, (0, 1))], [(0, (0, 1))])
    mixed = toy([(0, (0, 1))], [(0, (2, 3))], [(0, (0, 1))], prefill=(1,))
    for policy in ("lru", "lfu", "forecast", "belady"):
        assert by_policy(plain, 2, "lru", "lfu", "forecast")[policy].hits == 2
        assert by_policy(mixed, 2, "lru", "lfu", "forecast")[policy].hits == 2


def test_no_slots_no_hits() -> None:
    for result in replay_all(toy([(0, (0,))], [(0, (0,))]), [0], ["lru", "forecast"]):
        assert (result.hits, result.inserts, result.share_of_bound) == (0, 0, 1.0)


def test_all_slots_miss_each_expert_once() -> None:
    trace = toy(*([[(0, (step % 4,)), (1, (0, 3))] for step in range(12)]))
    for result in replay_all(trace, [8], ["lru", "lfu", "forecast"]):
        assert result.hits == 12 * 3 - 6
        assert result.share_of_bound == 1.0


@cache
def open_traces(path: Path) -> dict[str, Routes]:
    return read_routes(path)


@pytest.fixture(scope="module")
def routes(cases: Path) -> dict[str, Routes]:
    return open_traces(cases / "routing/decode_routes.csv.gz")


def test_every_open_trace_is_tried(routes: dict[str, Routes]) -> None:
    assert set(routes) == set(OPEN_TRACES)


@pytest.mark.slow
@pytest.mark.parametrize("share", [25, 50])
@pytest.mark.parametrize("name", OPEN_TRACES)
def test_forecast_beats_lru_and_lfu_on_every_open_trace(
    routes: dict[str, Routes], name: str, share: int
) -> None:
    """Even with eviction alone: refusing misses is an advantage on top."""
    trace = routes[name]
    slots = trace.header.space.total * share // 100
    results = by_policy(trace, slots, "lru", "lfu", "forecast")  # lru and lfu refuse nothing in any case
    better = max(results["lru"].hit_rate, results["lfu"].hit_rate)
    eviction = by_policy(trace, slots, "forecast", admit_all=True)["forecast"]
    for result in (results["forecast"], eviction):
        assert result.hit_rate > better + MARGIN
        assert result.hits <= results["belady"].hits
