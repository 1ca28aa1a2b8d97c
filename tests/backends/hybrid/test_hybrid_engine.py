"""Engines over the hybrid backend: the same tokens as over the CPU backend, and nothing left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hybrids import FIGURES, CachedStore, options
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import VOCAB, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.config import Override, load_config
from strata.core import Request, SamplingParams
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine, EngineOptions
from strata.interfaces.models import open_model
from strata.memory.policies import POLICIES
from strata.model.decoder import Decoder

SPECS = {"moe": moe_spec(3), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}
STORES = {name: CachedStore(spec, fmt="w4g64") for name, spec in SPECS.items()}
ENGINE = EngineOptions(
    context=64, pages=24, valid_tokens=VOCAB, page_tokens=8, kv_dtype="int8", chunk=16, max_running=4
)
CPU = CpuBackend(threads=1, activations="f32")
ROOT = Path(__file__).parents[3]


def requests(seed: int) -> list[Request]:
    """Some begin alike, so that pages are shared and copied."""
    rng = random.Random(seed)
    beginning = rng.choices(range(VOCAB), k=19)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    ends = [rng.choices(range(VOCAB), k=rng.randint(1, 9)) for _ in range(5)]
    prompts = [beginning[: rng.choice((3, 11, 19))] + end for end in ends]
    return [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]


def answers(engine: Engine, seed: int, abort: bool = False) -> list[list[int]]:
    """All requests at once; with abort, the second one is given up after a few steps."""
    asked = requests(seed)
    for request in asked:
        engine.add(request)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if abort and steps == 3:
            engine.abort("1")
    engine.check_integrity()
    return [request.generated for request in asked if not abort or request.request_id != "1"]


def hybrid_engine(name: str, seed: int | None, **changes: object) -> tuple[Engine, HybridBackend]:
    spec, store = SPECS[name], STORES[name]
    asked = options(store, spec, rows=20, logit_rows=4, blocks=32, **changes)
    backend = HybridBackend(EmulatedDevice(FIGURES, seed=seed), HostKernels(CPU), CPU, spec, asked)
    return Engine(Decoder(spec, store, backend), ENGINE), backend


@pytest.mark.parametrize("misses", ["cpu", "fetch", "auto"])
@pytest.mark.parametrize("name", SPECS)
def test_the_same_tokens_as_the_cpu_backend(name: str, misses: str) -> None:
    plain = answers(Engine(Decoder(SPECS[name], STORES[name], CPU), ENGINE), seed=1)
    engine, backend = hybrid_engine(name, seed=2, misses=misses)
    assert answers(engine, seed=1) == plain
    backend.check_integrity()
    answers(engine, seed=3, abort=True)
    backend.check_integrity()
    metrics = backend.metrics
    assert metrics is not None
    computed, fetched = metrics.experts.computed, metrics.experts.fetched + metrics.experts.streamed
    assert (computed > 0, fetched > 0) == (misses != "fetch", misses != "cpu")
    assert metrics.split.last_reason
    backend.close()
    backend.device.close()


def plain_answers(name: str, seed: int, cache: dict[tuple[str, int], list[list[int]]]) -> list[list[int]]:
    if (name, seed) not in cache:
        cache[name, seed] = answers(Engine(Decoder(SPECS[name], STORES[name], CPU), ENGINE), seed)
    return cache[name, seed]


KNOWN: dict[tuple[str, int], list[list[int]]] = {}


@given(
    name=st.sampled_from(sorted(SPECS)),
    requested=st.integers(0, 2),
    slots=st.integers(2, 20),
    misses=st.sampled_from(["cpu", "fetch", "auto"]),
    policy=st.sampled_from(["lru", "lfu", "forecast"]),
    inserts=st.sampled_from([0, 1, 3, None]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=25, deadline=None)
def test_any_cache_policy_split_and_order(
    name: str, requested: int, slots: int, misses: str, policy: str, inserts: int | None, seed: int
) -> None:
    wanted = plain_answers(name, requested, KNOWN)
    engine, backend = hybrid_engine(
        name,
        seed,
        slots=slots,
        misses=misses,
        policy=POLICIES[policy],
        inserts_per_step=inserts,
        prefetch=0.1,
    )
    assert answers(engine, requested) == wanted
    backend.check_integrity()
    backend.close()
    backend.device.close()


@pytest.mark.parametrize("slots", ["auto", "4", "40"])
def test_the_demo_answers_alike_with_an_emulated_device(slots: str) -> None:
    """`strata run --set device.use=emulated`: greedy text, int8 activations and KV as users have them."""
    texts = []
    for use in ("none", "emulated"):
        asked = {"device.use": use, "model.context": "256"}
        asked |= {"experts.slots": slots} if use == "emulated" else {}
        overrides = [Override(key, value, "test") for key, value in asked.items()]
        model = open_model(load_config(str(ROOT / "configs" / "demo.yaml"), overrides))
        assert model.engine.decoder.backend.name == ("hybrid" if use == "emulated" else "cpu")
        prompt = model.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        request = Request("0", prompt, SamplingParams(temperature=0.0, max_tokens=20), model.stop_ids)
        texts.append(list(model.engine.generate(request)))
    assert texts[0] == texts[1]
    assert len(texts[0]) > 3
