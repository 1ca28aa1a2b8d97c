"""The draft model: its KV, its guesses, what it leaves behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from engines import GREEDY, make_engine, prompt_of
from numpy.typing import NDArray
from test_exact import check_aborts_free_pages, facts, requests, run
from tiny_model import VOCAB, TinyStore, moe_spec

from strata.core import Batch, FinishReason, Request, SamplingParams
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.proposer import Ask
from strata.engine.speculative.speculator import Speculator
from strata.engine.speculative.vocabulary import IdMap, map_ids
from strata.model.decoder import Decoder


def with_draft(
    decoder: Decoder,
    draft: Decoder,
    length: int = 4,
    pages: int = 100,
    context: int = 64,
    ids: IdMap | None = None,
) -> Engine:
    """An engine over `decoder` whose drafts `draft` proposes."""
    engine = make_engine(decoder)
    model = DraftModel(draft, engine.kv, pages, context, chunk=16, ids=ids)
    engine.speculator = Speculator(model, LengthOptions(length, fixed=True), None)
    return engine


class Renumbered:
    """A decoder whose ids are others: `order` has the decoder's id for each of them."""

    def __init__(self, decoder: Decoder, order: NDArray[np.int32]) -> None:
        self.decoder, self.order = decoder, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, batch: Batch, cache: Any) -> Any:
        logits = self.decoder.forward(replace(batch, token_ids=self.order[batch.token_ids]), cache)
        return None if logits is None else self.decoder.backend.to_numpy(logits)[:, self.order]


def renumbered(decoder: Decoder, lacking: int = 0) -> tuple[Decoder, IdMap]:
    """The decoder with shuffled ids, of which the last ones are not told to be the same tokens."""
    order = np.random.default_rng(3).permutation(VOCAB).astype(np.int32)
    spelling = {index: f"{mine}" for index, mine in enumerate(order[: VOCAB - lacking])}
    ids = map_ids({index: f"{index}" for index in range(VOCAB)}, spelling, VOCAB)
    assert ids is not None
    return cast(Decoder, Renumbered(decoder, order)), ids


@pytest.mark.parametrize(("lacking", "least", "most"), [(0, 0.98, 1.0), (VOCAB // 5, 0.1, 0.97)])
def test_a_draft_with_other_ids_changes_nothing(
    cpu_decoders: dict[str, Decoder], lacking: int, least: float, most: float
) -> None:
    """The model itself under other ids guesses as well as under its own; without some of them, less well."""
    alone = {}
    for request in requests():
        alone.update(run(make_engine(cpu_decoders["moe"]), [request]))
    draft, ids = renumbered(cpu_decoders["moe"], lacking)
    engine = with_draft(cpu_decoders["moe"], draft, ids=ids)
    assert facts(run(engine, requests(), random.Random(1))) == facts(alone)
    assert engine.speculator is not None
    assert engine.speculator.figures.proposed > 50
    assert least <= engine.speculator.figures.acceptance <= most


def test_ids_that_a_draft_lacks_are_never_proposed() -> None:
    ids = map_ids({0: "a", 1: "b", 2: "c"}, {5: "c", 7: "a", 8: "a"}, 4)
    assert ids is not None
    assert ids.ids([0, 1, 2, 3, 99]) == [7, 5, 5, 5, 5]
    row = np.arange(9, dtype=np.float32)
    assert ids.logits(row).tolist() == [7.0, -np.inf, 5.0, -np.inf]
    assert row.tolist() == list(range(9))


@pytest.fixture(scope="module")
def other(cpu_decoders: dict[str, Decoder]) -> Decoder:
    """A random model with the same vocabulary: it agrees by chance only."""
    spec = moe_spec(1, moe_layers=(False,), experts=None)
    return Decoder(spec, TinyStore(spec, seed=5, fmt="w4g64"), cpu_decoders["moe"].backend)


def test_a_draft_changes_nothing(cpu_decoders: dict[str, Decoder], other: Decoder) -> None:
    """A random draft, and one that is the model itself; requests come and go in a batch."""
    alone = {}
    for request in requests():
        alone.update(run(make_engine(cpu_decoders["moe"]), [request]))
    for draft, least in ((other, 0.0), (cpu_decoders["moe"], 0.98)):
        engine = with_draft(cpu_decoders["moe"], draft)
        assert facts(run(engine, requests(), random.Random(1))) == facts(alone)
        assert engine.speculator is not None
        assert engine.speculator.figures.proposed > 50
        assert engine.speculator.figures.acceptance >= least


def test_sampled_drafts_use_the_random_numbers_of_the_sampler(cpu_decoders: dict[str, Decoder]) -> None:
    """case-29: a draft's sampler ignored the temperature. Equal models choose the same at any temperature."""
    hot = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=40)
    engine = with_draft(cpu_decoders["moe"], cpu_decoders["moe"], 8)
    list(engine.generate(Request("hot", prompt_of(6), hot)))
    assert engine.speculator is not None
    assert engine.speculator.figures.acceptance == 1.0
    assert engine.speculator.figures.tokens_per_forward > 6


def test_numbers_that_were_looked_at_come_again() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=9), 10)
    seen = sampler.ahead(5)
    assert sampler.ahead(5) == seen
    assert [sampler.random.random() for _ in range(5)] == seen


def test_an_abort_frees_the_pages_of_the_draft(cpu_decoders: dict[str, Decoder], other: Decoder) -> None:
    engine = with_draft(cpu_decoders["moe"], other)
    assert engine.speculator is not None
    draft = engine.speculator.proposer
    assert isinstance(draft, DraftModel)
    check_aborts_free_pages(engine, draft.pages)


def test_a_request_that_ends_with_its_first_token_leaves_no_pages(
    cpu_decoders: dict[str, Decoder], other: Decoder
) -> None:
    """Its prompt was computed in the very step that ended it."""
    (first,) = make_engine(cpu_decoders["moe"]).generate(
        Request("plain", prompt_of(5), replace(GREEDY, max_tokens=1))
    )
    engine = with_draft(cpu_decoders["moe"], other)
    assert engine.speculator is not None
    draft = engine.speculator.proposer
    assert isinstance(draft, DraftModel)
    stopped = Request("stopped", prompt_of(5), GREEDY, frozenset((first,)))
    assert list(engine.generate(stopped)) == [] and stopped.finish_reason is FinishReason.STOP
    engine.check_integrity()
    assert draft.pages.free == draft.pages.total


def test_what_does_not_fit_goes_on_without_drafts(cpu_decoders: dict[str, Decoder], other: Decoder) -> None:
    """Pages for one request of three; a context shorter than the prompt; the texts are whole all the same."""
    for pages, context in ((6, 64), (100, 16)):
        engine = with_draft(cpu_decoders["moe"], other, pages=pages, context=context)
        wanted = [Request(name, prompt_of(20, ord(name)), replace(GREEDY, max_tokens=20)) for name in "abc"]
        plain = run(make_engine(cpu_decoders["moe"]), [replace(each, tokens=[], pages=[]) for each in wanted])
        assert facts(run(engine, wanted)) == facts(plain)


def test_a_turn_of_a_conversation_shares_the_pages_of_the_last(cpu_decoders: dict[str, Decoder]) -> None:
    """The draft computes of a text only what it has not computed before, guesses apart."""
    engine = with_draft(cpu_decoders["moe"], cpu_decoders["moe"])
    first = Request("one", prompt_of(30), replace(GREEDY, max_tokens=8))
    list(engine.generate(first))
    assert engine.speculator is not None
    draft = engine.speculator.proposer
    assert isinstance(draft, DraftModel)
    again = Request("two", [*first.tokens, 5, 6], GREEDY)
    draft.propose([Ask(again, 1, Sampler(GREEDY, VOCAB))])
    assert draft._texts["two"].own.shared >= 30
    draft.forget("two")


@pytest.mark.parametrize("method", ["propose", "measured"])
def test_a_draft_that_fails_ends_speculation_and_no_request(
    cpu_decoders: dict[str, Decoder], other: Decoder, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = with_draft(cpu_decoders["moe"], other)
    assert engine.speculator is not None
    failing = engine.speculator.proposer if method == "propose" else engine.speculator._policy
    monkeypatch.setattr(failing, method, lambda *_: 1 / 0)
    plain = list(make_engine(cpu_decoders["moe"]).generate(Request("a", prompt_of(5), GREEDY)))
    with pytest.warns(RuntimeWarning, match="no more speculative decoding"):
        assert list(engine.generate(Request("a", prompt_of(5), GREEDY))) == plain
