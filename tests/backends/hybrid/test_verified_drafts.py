"""Drafts that a device verifies: the same texts, and of each request two numbers cross the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hybrids import FIGURES, CachedStore, options
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import VOCAB, moe_spec
from told_drafts import Told

from strata.backends.base import Verified
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.host_verify import UNDECIDED, verify
from strata.core import Request, SamplingParams
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine, EngineOptions
from strata.engine.sampler import Sampler, top_k
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.speculator import Speculator
from strata.model.decoder import Decoder

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01, seed=3, max_tokens=14)


class Witness(HybridBackend):
    """Counts what is drawn on the device, and what is read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.verdicts: list[Verified] = []
        self.best_rows = self.whole_rows = 0

    def verify_drafts(self, *arguments: Any) -> list[Verified]:
        found = super().verify_drafts(*arguments)
        self.verdicts += found
        return found

    def best_logits(self, logits: Any, count: int, columns: int) -> Any:
        self.best_rows += logits.rows
        return super().best_logits(logits, count, columns)

    def to_numpy(self, x: Any) -> Any:
        self.whole_rows += x.rows
        return super().to_numpy(x)


def engine_of(seed: int) -> tuple[Engine, Witness]:
    spec = moe_spec()
    store, cpu = CachedStore(spec), CpuBackend(threads=1, activations="f32")
    asked = options(store, spec, slots=8, rows=64)
    backend = Witness(EmulatedDevice(FIGURES, seed=seed), HostKernels(cpu), cpu, spec, asked)
    sizes = EngineOptions(64, 40, VOCAB, page_tokens=8, kv_dtype="f32", chunk=24, max_running=6)
    return Engine(Decoder(spec, store, backend), sizes), backend


def texts(engine: Engine, wanted: Sequence[Request]) -> dict[str, list[int]]:
    for request in wanted:
        engine.add(request)
    while engine.busy:
        engine.step()
        engine.check_integrity()
    return {request.request_id: request.generated for request in wanted}


def requests(drawn_only: bool) -> list[Request]:
    """Those for whom the device may draw; beside them those that need more."""
    drawn = [
        Request("greedy", [1, 2, 3], GREEDY),
        Request("sampled", [4, 5], SAMPLED),
        Request("warm", [6] * 5, replace(SAMPLED, temperature=0.5, top_p=1.0, min_p=0.0, seed=4)),
        Request("stopped", [7, 8], replace(SAMPLED, seed=5), frozenset(range(0, VOCAB, 9))),
    ]
    if drawn_only:
        return drawn
    others = [
        Request("endless", [9], replace(SAMPLED, ignore_eos=True), frozenset((3, 4))),
        Request("logprobs", [3, 1], GREEDY, logprobs=2),
        Request("penalized", [5, 5], replace(GREEDY, repeat_penalty=1.3)),
    ]
    return [pair for two in zip(others, drawn, strict=False) for pair in two] + drawn[3:]


@pytest.mark.parametrize("lies", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("drawn_only", [True, False])
def test_drafts_change_no_text(lies: float, drawn_only: bool) -> None:
    engine, _ = engine_of(2)
    wanted = texts(engine, requests(drawn_only))
    engine, witness = engine_of(2)
    engine.speculator = Speculator(Told(wanted, lies, VOCAB), LengthOptions(4, fixed=True), None)
    assert texts(engine, requests(drawn_only)) == wanted
    decided = [found for found in witness.verdicts if found.token != UNDECIDED]
    assert len(decided) > 0.9 * len(witness.verdicts) > 0
    if lies < 1:
        assert sum(found.accepted for found in decided) > len(decided)
    if drawn_only:
        assert witness.whole_rows == 0


def test_a_verified_draft_brings_two_numbers() -> None:
    """Beside a request that needs all logits of its own rows, and of no other's."""
    asked = [Request("greedy", [1, 2, 3], GREEDY), Request("logprobs", [3, 1], GREEDY, logprobs=2)]
    engine, _ = engine_of(2)
    told = Told(texts(engine, asked), 0.0, VOCAB)
    engine, _ = engine_of(2)
    for request in (Request("greedy", [1, 2, 3], GREEDY), Request("logprobs", [3, 1], GREEDY, logprobs=2)):
        engine.add(request)
    engine.step()
    before = engine.executor.logit_bytes
    engine.speculator = Speculator(told, LengthOptions(4, fixed=True), None)
    assert len(engine.step()) == 10
    assert engine.executor.logit_bytes - before == 8 + 5 * VOCAB * 4


settings_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0, 100.0, 1e-6]),
    top_k=st.integers(1, 20),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0 - 1e-9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    seed=st.integers(0, 99),
)


@given(settings_of, st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_the_device_draws_the_samplers_token_or_none(params: SamplingParams, seed: int, right: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.round(rng.standard_normal((5, VOCAB)) * 2, 1).astype(np.float32)
    drawing = Sampler(params, VOCAB).drawing(5)
    assert drawing is not None
    sampler = Sampler(params, VOCAB)
    wanted = [sampler.sample(row, []) for row in rows]
    draft = np.array(wanted, np.int32)
    draft[right] = (draft[right] + 1) % VOCAB
    best = [top_k(row, params.top_k) for row in rows]
    values, ids = np.array([b.logits for b in best]), np.array([b.ids for b in best], np.int32)
    numbers = np.array(drawing.numbers, np.float32).astype(np.float64)
    settings = np.array(drawing[:4], np.float32).astype(np.float64)
    accepted, token = verify(values, ids, draft, settings, numbers)
    assert (accepted, token) == (right, wanted[right]) or (token == UNDECIDED and accepted <= right)


def test_who_may_not_be_drawn_for() -> None:
    for params in (SAMPLED, GREEDY):
        assert Sampler(params, VOCAB).drawing(3) is not None
        assert Sampler(params, VOCAB, banned=[3]).drawing(3) is None
        assert Sampler(params, VOCAB, bias={3: 1.0}).drawing(3) is None
        assert Sampler(replace(params, repeat_penalty=1.1), VOCAB).drawing(3) is None
    assert Sampler(replace(SAMPLED, top_k=0), VOCAB).drawing(3) is None
    assert Sampler(replace(SAMPLED, temperature=1e-7), VOCAB).drawing(3) is None
