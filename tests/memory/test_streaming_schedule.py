"""Double-buffered layer streaming through regions and transfers: right in any order, and well overlapped."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from device_figures import ROUND, RTX_3090
from dropped_waits import DroppingDevice
from streaming import Shape, StreamingRun, expected, host_memory, random_case

from strata.device.base import RaceError
from strata.device.emulated import EmulatedDevice
from strata.device.timeline import Timeline, hidden_share
from strata.memory.transfers import TransferOptions


def test_a_thousand_random_schedules_compute_the_same() -> None:
    for seed in range(1000):
        shape, records, start, options = random_case(random.Random(seed))
        device = EmulatedDevice(ROUND, seed=seed)
        run = StreamingRun(device, shape, host_memory(device, shape, records), options)
        assert (run.run(start) == expected(shape, records, start)).all(), f"seed {seed}: {shape}"
        run.region.check_integrity()
        device.close()


SMALL = Shape(layers=5, experts=2, record_bytes=300, macs=2000)
CASES = [replace(SMALL, pinned=pinned, out_pinned=pinned) for pinned in (True, False)]
OPTIONS = TransferOptions(staging_bytes=512)


def run_dropping(
    shape: Shape, seed: int | None, dropped: int | None, kinds: tuple[str, ...]
) -> tuple[str, DroppingDevice]:
    """What came of a run without one wait."""
    numbers = np.random.default_rng(5)
    records = numbers.integers(0, 256, shape.layers * shape.layer_bytes, dtype=np.uint8)
    start = numbers.integers(0, 256, 32, dtype=np.uint8)
    device = DroppingDevice(EmulatedDevice(ROUND, seed=seed), dropped, kinds)
    try:
        source = host_memory(device, shape, records)
        result = StreamingRun(device, shape, source, OPTIONS).run(start)
    except RaceError:
        return "race", device
    return ("right" if (result == expected(shape, records, start)).all() else "wrong"), device


@pytest.mark.parametrize("shape", CASES, ids=["pinned", "pageable"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_no_wait_can_be_left_out(shape: Shape, seed: int | None) -> None:
    outcome, device = run_dropping(shape, seed, None, ("wait", "sync"))
    assert outcome == "right"
    assert len(device.useful) >= 2 * shape.layers - 2
    for dropped in device.useful:
        outcome, _ = run_dropping(shape, seed, dropped, ("wait", "sync"))
        assert outcome == "race", f"wait {dropped} of {device.calls} was left out and nobody noticed"


def test_believing_that_copies_are_done_is_noticed() -> None:
    """A query that says yes without asking matters when it spares the wait for a batch under way."""
    _, device = run_dropping(SMALL, None, None, ("query",))
    outcomes = [run_dropping(SMALL, None, query, ("query",))[0] for query in range(device.calls)]
    assert "race" in outcomes
    assert set(outcomes) <= {"race", "right"}


# Experts in w4g64 (4.25 bits per weight): hidden x width x 3 weights. Shapes: the models' config.json.
QWEN3_30B = Shape(layers=48, experts=128, record_bytes=2048 * 768 * 3 * 17 // 32)
GLM_45_AIR = Shape(layers=45, experts=128, record_bytes=4096 * 1408 * 3 * 17 // 32)


@pytest.mark.parametrize("tokens", [1024, 8192, 65536])
@pytest.mark.parametrize("shape", [QWEN3_30B, GLM_45_AIR], ids=["Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_copies_of_the_next_layer_cross_under_the_compute_of_this_one(shape: Shape, tokens: int) -> None:
    """Both models route 8 of 128; whichever of copy and compute is shorter, 90 % of it is hidden."""
    weights = shape.record_bytes * 32 // 17
    shape = replace(shape, macs=tokens * 8 // 128 * weights)
    timeline = Timeline()
    device = EmulatedDevice(RTX_3090, timeline=timeline, with_data=False)
    run = StreamingRun(device, shape, device.host_alloc(shape.layers * shape.layer_bytes, "experts"), OPTIONS)
    run.fetch(0)
    for layer in range(shape.layers):
        run.layer(layer)
    device.sync()
    copies, compute = timeline.spans("h2d"), timeline.spans("compute")
    assert [span.name for span in copies] == [span.name for span in compute]
    assert hidden_share(copies, compute) >= 0.9
    for first, second in zip(compute, copies[1:], strict=False):
        pair = hidden_share([first], [second])
        assert pair >= 0.9, f"{second.name} is {pair:.0%} hidden under {first.name}"
    ideal = max(sum(s.end - s.start for s in spans) for spans in (copies, compute))
    assert device.now() <= ideal * (1 + 1.1 / shape.layers) + 2e-3
