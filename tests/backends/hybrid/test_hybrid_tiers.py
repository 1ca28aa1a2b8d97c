"""Texts of an engine whose KV pages have not all room on the device are those of one where they have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hybrids import FIGURES, CachedStore, options
from tiny_model import VOCAB, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.core import Request, SamplingParams
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine, EngineOptions
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator
from strata.errors import CapacityError
from strata.model.decoder import Decoder

SPECS = {"moe": moe_spec(), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}
ENGINE = EngineOptions(64, 60, VOCAB, page_tokens=8, kv_dtype="int8", chunk=12, max_running=6)


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=1, activations="f32")


def make_engine(
    cpu: CpuBackend, name: str, seed: int, slots: int = 8, kv_tier: str = "device", **changes: Any
) -> Engine:
    spec = SPECS[name]
    store = CachedStore(spec)
    device = EmulatedDevice(FIGURES, seed=seed)
    rows = {"rows": ENGINE.chunk + ENGINE.logit_rows, "logit_rows": ENGINE.logit_rows}  # with drafts
    asked = options(store, spec, slots=slots, kv_tier=kv_tier, staged_blocks=30, **rows)
    backend = HybridBackend(device, HostKernels(cpu), cpu, spec, asked)
    return Engine(Decoder(spec, store, backend), replace(ENGINE, **changes))


def traffic(seed: int) -> list[Request]:
    """Greedy and sampled requests, some of which begin alike; every fourth goes on for long."""
    rng = random.Random(seed)
    start = rng.choices(range(VOCAB), k=20)
    requests = []
    for index in range(10):
        prompt = start[: rng.randint(0, 20)] + rng.choices(range(VOCAB), k=rng.randint(1, 15))
        answer = rng.randint(20, 28) if index % 4 == 0 else rng.randint(1, 12)
        temperature = rng.choice((0.0, 0.9))
        sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=answer)
        requests.append(Request(f"r{index}", prompt, sampling))
    return requests


def texts(engine: Engine, seed: int) -> list[list[int]]:
    """Requests come while others run; one is aborted after its third token."""
    waiting, requests = traffic(seed), traffic(seed)
    requests = list(waiting)
    rng = random.Random(seed)
    while waiting or engine.busy:
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        engine.step()
        engine.check_integrity()
        if len(requests[2].generated) >= 3:
            engine.abort("r2")
    return [request.generated[:3] if request is requests[2] else request.generated for request in requests]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("places", [8])
def test_pages_that_move_change_no_token(cpu: CpuBackend, name: str, places: int) -> None:
    wanted = texts(make_engine(cpu, name, 1), 5)
    # Two slots are those of one token: they lend no place.
    engine = make_engine(cpu, name, 2, slots=2, pages=places, host_pages=30, reserve_pages=2)
    assert texts(engine, 5) == wanted
    assert engine.tiers is not None
    assert engine.kv_place.startswith("device memory; pool: ") and " pages" in engine.kv_place
    moved = engine.tiers.statistics
    assert moved.out > 10 and moved.back > 2 and engine.scheduler.preempted > 0
    backend: Any = engine.decoder.backend
    backend.check_integrity()
    backend.close()
    backend.device.close()


@pytest.mark.parametrize("name", SPECS)
def test_pages_at_the_host_change_no_token(cpu: CpuBackend, name: str) -> None:
    wanted = texts(make_engine(cpu, name, 1), 6)
    engine = make_engine(cpu, name, 3, kv_tier="host")
    assert texts(engine, 6) == wanted
    assert engine.kv_place.endswith("two layers at a time on the device")
    backend: Any = engine.decoder.backend
    backend.check_integrity()
    backend.close()
    backend.device.close()


class RandomDrafts(NgramProposer):
    """Proposes anything, so that nearly all of it is rolled back."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        chosen = random.Random(len(asks[0].request.tokens))
        return [Proposal(tuple(chosen.choices(range(VOCAB), k=ask.count))) for ask in asks]


@pytest.mark.parametrize("proposer", [NgramProposer, RandomDrafts])
@pytest.mark.parametrize("tiers", [{"slots": 2, "pages": 8, "host_pages": 30}, {"kv_tier": "host"}])
def test_drafts_change_no_token_on_two_tiers(
    cpu: CpuBackend, tiers: dict[str, Any], proposer: type[NgramProposer]
) -> None:
    """Steps of several tokens per request while pages leave, come back and are shared."""
    wanted = texts(make_engine(cpu, "moe", 1), 5)
    engine = make_engine(cpu, "moe", 2, **tiers)
    engine.speculator = Speculator(proposer(), LengthOptions(5, fixed=True), None)
    assert texts(engine, 5) == wanted
    assert engine.speculator.figures.proposed > 10
    backend: Any = engine.decoder.backend
    backend.check_integrity()
    backend.close()
    backend.device.close()


def test_a_long_prompt_takes_expert_slots_and_gives_them_back(cpu: CpuBackend) -> None:
    """Six places are not enough for 60 tokens; slots lend the rest, down to those of one token."""
    prompt = random.Random(3).choices(range(VOCAB), k=52)
    wanted = list(
        make_engine(cpu, "moe", 1).generate(Request("a", prompt, SamplingParams(0.0, max_tokens=8)))
    )
    engine = make_engine(cpu, "moe", 4, pages=6, host_pages=4, share_prefixes=False)
    backend: Any = engine.decoder.backend
    assert (backend.memory.region.slots, backend.cache.slots) == (8, 8)
    fewest = 8
    request = Request("a", prompt, SamplingParams(0.0, max_tokens=8))
    engine.add(request)
    while engine.busy:
        engine.step()
        engine.check_integrity()
        fewest = min(fewest, backend.memory.region.slots)
    assert request.generated == wanted
    assert 2 <= fewest < 8
    for _ in range(20):
        backend.device.host_work({"host": 1.0})
        engine.step()
    assert (backend.memory.region.slots, backend.cache.slots) == (8, 8)
    backend.check_integrity()


def test_a_request_that_the_device_can_never_hold_is_refused(cpu: CpuBackend) -> None:
    engine = make_engine(cpu, "moe", 1, slots=2, pages=2, host_pages=50)
    most = engine.scheduler.most_pages
    with pytest.raises(CapacityError, match=f"may need 8 KV pages, there are {most}"):
        engine.add(Request("a", [1] * 60, SamplingParams(max_tokens=100)))
