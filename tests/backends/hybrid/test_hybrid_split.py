"""experts.misses: the cost model's answer, corrected by measured times, and taken back when it was wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hybrids import FIGURES, SPEEDS, CachedStore, make_hybrid, tokens
from tiny_model import moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.split import PROBE_EVERY, TRUSTED, Decision, LayerMisses, Mean, Split
from strata.backends.parts import ExpertBank
from strata.device.emulated import EmulatedDevice
from strata.device.figures import LinkFigures
from strata.plan.cost import Misses
from strata.plan.speeds import Speeds
from strata.store.formats import FORMATS, ExpertLayout

LAYOUT = ExpertLayout(FORMATS["w4g64"], FORMATS["w4g64"], 2048, 768, 1, False)
BANK = ExpertBank(0, 128, LAYOUT, lambda index: np.empty(0, np.uint8))
# 2.5 MB cross in 208 us and are read by the host in 25 us.
OLD_SERVER = Speeds(1e11, 5e11, 1e9, device_read=7e11, device_macs=1.7e13, to_device=1.2e10, to_host=1.2e10)


def question(missed: int) -> LayerMisses:
    """Of one token."""
    return LayerMisses(BANK, 1, 8, 8 - missed, range(missed), [1] * missed)


# A prompt: 32 rows for each expert, half of them on the device.
CROWD = LayerMisses(BANK, 512, 8, 64, range(64), [1 + i for i in range(64)])


@pytest.mark.parametrize("mode", ["cpu", "fetch", "auto"])
def test_every_miss_is_answered_once(mode: Misses) -> None:
    split = Split(mode, OLD_SERVER)
    for missed in range(9):
        decision = split.decide(question(missed))
        assert sorted((*decision.fetch, *decision.compute)) == list(range(missed))
        assert mode == "auto" or len(decision.fetch) == (missed if mode == "fetch" else 0)
        assert bool(decision.reason) == (missed > 0)


def test_the_host_computes_a_token_and_fetches_what_many_rows_share() -> None:
    """The CPU computes a missed expert 8 times faster than the bus brings it; a prompt is another matter."""
    split = Split("auto", OLD_SERVER)
    assert split.decide(question(4)).fetch == ()
    crowd = split.decide(CROWD)
    assert 0 < len(crowd.compute) < 64
    assert min(crowd.fetch) > max(crowd.compute), "the bus takes the experts with the most rows"
    assert "fetched" in split.metrics.last_reason


def test_a_host_that_is_slower_than_planned_gives_work_to_the_bus() -> None:
    split = Split("auto", OLD_SERVER)
    for _ in range(60):
        split.host_took(1e-4, 2e-3)
    assert split.metrics.host_ratio == pytest.approx(20, rel=0.05)
    assert len(split.decide(question(4)).fetch) >= 2
    for _ in range(60):
        split.host_took(1e-4, 1e-4)
    assert split.decide(question(4)).fetch == ()


def test_a_bus_that_is_slower_than_planned_gets_less() -> None:
    split = Split("auto", OLD_SERVER)
    before = len(split.decide(CROWD).fetch)
    for _ in range(60):
        split.bus_took(1_000_000, 10 * 1_000_000 / OLD_SERVER.to_device, exposed=True)
    assert split.metrics.bus_ratio == pytest.approx(10, rel=0.05)
    assert len(split.decide(CROWD).fetch) < before
    split.bus_took(1_000_000, 50 * 1_000_000 / OLD_SERVER.to_device, exposed=False)
    assert split.metrics.bus_ratio == pytest.approx(10, rel=0.05), (
        "hidden fetches say nothing of a slower bus"
    )


def test_fetching_that_made_layers_slower_ends_and_is_tried_again() -> None:
    split = Split("auto", OLD_SERVER)
    for _ in range(TRUSTED):
        split.host_took(1.0, 1.0)
        split.bus_took(1, 1 / OLD_SERVER.to_device, exposed=True)
    fetching, computing = split.decide(CROWD), Decision((), tuple(range(64)), "", 1e-3)
    assert fetching.fetch
    for _ in range(TRUSTED):
        split.layer_took(fetching, 2 * fetching.all_computed)
        split.layer_took(computing, computing.all_computed)
    assert split.decide(CROWD).fetch == ()
    assert split.metrics.taken_back == 1
    assert "times as slow" in split.metrics.last_reason
    probes = [decision for decision in (split.decide(CROWD) for _ in range(PROBE_EVERY)) if decision.fetch]
    assert [len(decision.fetch) for decision in probes] == [1]
    assert split.metrics.probes == 1
    for _ in range(80):  # the bus is as fast as promised after all
        split.layer_took(fetching, 0.5 * fetching.all_computed)
    assert split.decide(CROWD).fetch


def test_a_mean_forgets_its_guess_and_bounds_what_one_sample_does() -> None:
    mean = Mean()
    mean.add(4.0)
    assert (mean.value, mean.trusted) == (4.0, False)
    mean.add(2.0)
    assert mean.value == 3.0
    for _ in range(TRUSTED):
        mean.add(3.0)
    mean.add(1e9)
    assert mean.trusted
    assert 3.0 < mean.value < 6.0


@lru_cache
def steps(misses: Misses, seconds_per_byte: float, promised: float, count: int = 40) -> tuple[float, Split]:
    """Virtual seconds of decoding with a bus that keeps a promise or does not."""
    spec = moe_spec(2, moe_layers=(True, True))
    link = LinkFigures(1 / seconds_per_byte, 1e-6, 1e-5)
    device = EmulatedDevice(replace(FIGURES, h2d=link))
    speeds = replace(SPEEDS, to_device=promised)
    hybrid = make_hybrid(
        CpuBackend(threads=1, activations="f32"),
        CachedStore(spec),
        spec,
        device=device,
        misses=misses,
        speeds=speeds,
        slots=0,
        prefetch=2.0,
        simulated=replace(SPEEDS, host_read=1e8),
    )
    ids = tokens(count + 10)
    hybrid.feed(ids[:1])
    begin = device.now()
    for index in range(1, count):
        hybrid.feed(ids[index : index + 1])
    seconds = device.now() - begin
    hybrid.close()
    return seconds, hybrid.backend.flow.split


@pytest.mark.parametrize("promised", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("real", [1e7, 1e9])
def test_auto_is_as_good_as_the_better_fixed_choice(real: float, promised: float) -> None:
    """Whatever the plan promised of the bus. The first steps pay for learning; probes cost a little."""
    fixed = [steps(mode, 1 / real, 1e9)[0] for mode in ("cpu", "fetch")]
    seconds, split = steps("auto", 1 / real, promised)
    assert seconds <= 1.25 * min(fixed), f"{split.metrics}"
