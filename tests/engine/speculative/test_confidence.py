"""How sure a draft model is, and that it stops where the next token does not pay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from engines import GREEDY, make_engine, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from simulated import MODELS, Sure, decode, measured_cost, speed
from test_draft_model import with_draft
from test_exact import facts, requests, run
from test_mtp import layer_of, proposer_of, with_layer
from tiny_model import VOCAB

from strata.core import Batch, Request
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.engine.speculative.acceptance import Acceptance
from strata.engine.speculative.confidence import GUESSES, band, trust
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.mtp import MtpProposer
from strata.engine.speculative.proposer import Ask
from strata.engine.speculative.speculator import Speculator
from strata.model.decoder import Decoder


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40), st.data())
def test_the_band_is_that_of_the_probability(logits: list[float], data: st.DataObject) -> None:
    """By a softmax in f64; beside an edge both bands are right. Impossible tokens are no part of the sum."""
    token = data.draw(st.integers(0, len(logits) - 1))
    exact = np.exp(np.array(logits) - max(logits))
    probability = float(exact[token] / exact.sum())
    found = trust(np.array([*logits, -np.inf], np.float32), token)
    assert band(probability * (1 - 1e-5)) <= found <= band(probability * (1 + 1e-5))


def test_surer_bands_are_thought_to_be_right_more_often() -> None:
    """Before anything was tested; and what was tested in one band says nothing of the others."""
    seen = Acceptance({}, guesses=GUESSES)
    bands = range(len(GUESSES))
    before = [seen.chances([each])[0] for each in bands]
    assert before == sorted(before) and len(bands) == band(1.0) + 1
    for _ in range(50):
        seen.add([3, 3], 2, False)
    after = [seen.chances([each])[0] for each in bands]
    assert after[3] > 0.95 and [*after[:3], *after[4:]] == [*before[:3], *before[4:]]


class Timed:
    """A decoder whose passes take `seconds` of `clock`."""

    def __init__(self, decoder: Decoder, clock: list[float], seconds: float) -> None:
        self.decoder, self.clock, self.seconds = decoder, clock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, batch: Batch, cache: Any) -> Any:
        self.clock[0] += self.seconds
        return self.decoder.forward(batch, cache)


def timed(engine: Engine, clock: list[float]) -> Engine:
    """What pays says how long its drafts are."""
    engine.executor.decoder = cast(Decoder, Timed(engine.executor.decoder, clock, 1.0))
    assert engine.speculator is not None
    engine.speculator = Speculator(
        engine.speculator.proposer, LengthOptions(), lambda rows, **_: 1.0, lambda: clock[0]
    )
    return engine


def test_texts_stay_the_same_where_drafts_stop_by_confidence(cpu_decoders: dict[str, Decoder]) -> None:
    """The model itself as its draft, in batches, greedy and sampled."""
    decoder, clock, alone = cpu_decoders["moe"], [0.0], {}
    for request in requests():
        alone.update(run(make_engine(decoder), [request]))
    engine = timed(with_draft(decoder, cast(Decoder, Timed(decoder, clock, 0.02))), clock)
    assert facts(run(engine, requests(), random.Random(1))) == facts(alone)
    assert engine.speculator is not None
    figures = engine.speculator.figures
    assert figures.proposed_by["draft"] > 20 and figures.acceptance > 0.9


def test_a_draft_ends_where_no_more_is_wanted(cpu_decoders: dict[str, Decoder]) -> None:
    """Of a draft model in a batch, each after as many tokens as it is told; their trusts come along."""
    decoder = cpu_decoders["moe"]
    engine = with_draft(decoder, decoder)
    assert engine.speculator is not None
    proposer = engine.speculator.proposer
    assert isinstance(proposer, DraftModel)
    asks = []
    for name, count in (("one", 1), ("three", 3), ("all", 9)):
        request = Request(name, prompt_of(12, count), replace(GREEDY, max_tokens=30))
        asks.append(Ask(request, 6, Sampler(GREEDY, VOCAB), lambda trusts, most=count: len(trusts) < most))
    free = proposer.propose([replace(ask, more=None) for ask in asks])
    found = proposer.propose(asks)
    for ended, whole, length in zip(found, free, (1, 3, 6), strict=True):
        assert ended.tokens == whole.tokens[:length]
        assert len(ended.trusts) == length and not whole.trusts


@pytest.mark.parametrize("kept", [0, 3])
def test_rows_that_wait_for_a_layer_are_read_apart(cpu_decoders: dict[str, Decoder], kept: int) -> None:
    """All of them or some: what it guesses then is what it guesses when it reads all at once."""
    found = []
    for apart in (False, True):
        engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]), length=0)
        proposer: MtpProposer = proposer_of(engine)
        request = Request("late", prompt_of(20), replace(GREEDY, max_tokens=30))
        engine.add(request)
        for _ in range(12):
            engine.step()
        behind = proposer.behind(request)
        assert behind is not None and behind > 8
        if apart:
            proposer.read(request, behind - kept)
            assert proposer.behind(request) == kept
        found.append(proposer.propose([Ask(request, 4, Sampler(GREEDY, VOCAB))])[0].tokens)
    assert found[0] == found[1] and len(found[0]) == 4


def mixed(seed: int, tokens: int = 4000) -> list[tuple[float, bool]]:
    """Chances and what came of them: most tokens are nearly sure, others are coins."""
    chosen = random.Random(seed)
    chances = chosen.choices((0.97, 0.6, 0.25), (4, 2, 4), k=tokens)
    return [(chance, chosen.random() < chance) for chance in chances]


def test_who_knows_when_it_is_right_gains_more() -> None:
    """The same text with and without knowing (virtual time); least where a row more costs least."""
    text, rates = mixed(1), dict[str, float]()
    for model in MODELS:
        for name, chances in (("sure", [chance for chance, _ in text]), ("all the same", [0.9])):
            drafts = Sure(lambda _, position: text[position % len(text)][1], 0.03, chances=chances)
            steps, _ = decode(drafts, measured_cost(model), lambda rows: 1 + 0.05 * rows, 600)
            rates[name] = speed(steps)
        assert rates["sure"] > (1.0 if model == "random MoE" else 1.05) * rates["all the same"]
