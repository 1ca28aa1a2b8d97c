"""Experts on disk, in a small host memory and on the device: fetches come through the host's cache."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.config import Override, load_config
from strata.core import ExpertId, Request, SamplingParams
from strata.device.emulated_memory import POISON
from strata.engine.tier import open_tier
from strata.interfaces import planning
from strata.interfaces.models import LoadedModel, open_model
from strata.memory.expert_host import HostExperts
from strata.plan.plan import Plan

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.yaml")


def open_demo(**asked: str) -> LoadedModel:
    pairs = {"model.context": "256", **{key.replace("__", "."): value for key, value in asked.items()}}
    return open_model(load_config(DEMO, [Override(key, value, "test") for key, value in pairs.items()]))


def with_memory(monkeypatch: pytest.MonkeyPatch, experts: int) -> None:
    """Whoever plans from now on finds room for so many experts in host memory."""
    inner = planning.plan_run

    def plan_run(*args: Any, **kwargs: Any) -> Plan:
        plan = inner(*args, **kwargs)
        return replace(plan, host=replace(plan.host, in_memory=experts, disk_bytes=1))

    monkeypatch.setattr("strata.interfaces.models.plan_run", plan_run)
    # LRU evicts for every expert; the default policy lets most of them pass through.
    monkeypatch.setattr("strata.engine.load.open_tier", functools.partial(open_tier, policy="lru"))


def text(model: LoadedModel) -> list[int]:
    prompt = model.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    return list(model.engine.generate(Request("0", prompt, sampling, model.stop_ids)))


def poison_evicted(tier: HostExperts) -> list[ExpertId]:
    """A place of host memory is overwritten the moment its expert is evicted, whoever still reads it."""
    evicted: list[ExpertId] = []
    policy, size = tier.cache.policy, tier.place_bytes
    inner = policy.on_evict

    def on_evict(expert: ExpertId) -> None:
        place = tier.cache.slot_of(expert)
        assert place is not None
        tier._memory[place * size : (place + 1) * size] = POISON
        evicted.append(expert)
        inner(expert)

    policy.on_evict = on_evict  # type: ignore[method-assign]
    return evicted


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return text(open_demo())


@pytest.mark.parametrize("misses", ["fetch", "auto"])
@pytest.mark.parametrize("memory", [1, 12, 70])
def test_the_text_of_a_machine_with_enough_memory(
    plain: list[int], misses: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 192 experts `memory` fit into host memory, and 30 onto the device."""
    with_memory(monkeypatch, memory)
    model = open_demo(device__use="emulated", experts__slots="30", experts__misses=misses)
    engine: Any = model.engine
    tier, backend = engine.decoder.tier, engine.decoder.backend
    assert tier is not None and tier.cache.slots <= memory
    evicted = poison_evicted(tier)
    direct: list[ExpertId] = []
    for layer in engine.decoder.layers:
        object.__setattr__(layer.ffn.experts.bank, "record", direct.append)
    assert text(model) == plain
    metrics = backend.metrics
    assert bool(evicted) == (memory > 1)
    assert metrics.experts.streamed + metrics.experts.fetched > 20
    assert not direct, "a record was read past the tier"
    backend.memory.queue.drain()
    backend.source.settle()
    assert not backend.source._loans, "nothing is held longer than its transfer"
    engine.check_integrity()
    tier.check_integrity()
    backend.close()
    backend.device.close()
