"""The layer that predicts further tokens: which rows it reads, what it guesses, what it leaves behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines import GREEDY, make_engine, prompt_of
from numpy.typing import NDArray
from test_exact import LONG, check_aborts_free_pages, facts, requests, run
from tiny_model import TinyStore, moe_spec

from strata.backends.base import KvSpec
from strata.core import Batch, Request
from strata.core import Sequence as Rows
from strata.engine.engine import Engine
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.mtp import FILLED, READ_AT, MtpProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator
from strata.model.architectures.further import further_spec
from strata.model.decoder import Decoder
from strata.model.further import FurtherLayer
from strata.plan.spec import ModelSpec
from strata.store import names


def layer_of(decoder: Decoder) -> FurtherLayer:
    """A random layer for a random model: it agrees by chance only."""
    spec = further_spec(decoder.spec)
    return FurtherLayer(spec, TinyStore(spec, seed=3), decoder.backend)


def with_layer(decoder: Decoder, layer: FurtherLayer, length: int = 4, **changes: Any) -> Engine:
    """An engine over `decoder` whose drafts `layer` proposes. changes: of the engine's options."""
    engine = make_engine(decoder, **changes)
    options = engine.options
    kv = KvSpec.of(layer.spec, options.page_tokens, options.kv_dtype)
    propose_by(engine, MtpProposer(decoder, layer, kv, 100, options.context), length)
    return engine


def propose_by(engine: Engine, proposer: MtpProposer, length: int = 4) -> None:
    engine.pages.overlap = 1
    engine.speculator = Speculator(proposer, LengthOptions(length, fixed=True), None)


def proposer_of(engine: Engine) -> MtpProposer:
    assert engine.speculator is not None
    proposer = engine.speculator.proposer
    assert isinstance(proposer, MtpProposer)
    return proposer


@pytest.mark.parametrize("name", ["moe", "mla"])
def test_it_changes_nothing(cpu_decoders: dict[str, Decoder], name: str) -> None:
    """A random layer; requests come and go in a batch, greedy and sampled."""
    decoder, alone = cpu_decoders[name], {}
    for request in requests():
        alone.update(run(make_engine(decoder), [request]))
    engine = with_layer(decoder, layer_of(decoder))
    assert facts(run(engine, requests(), random.Random(1))) == facts(alone)
    assert engine.speculator is not None
    assert engine.speculator.figures.proposed > 50


class Checked:
    """Guesses of a proposer, each compared with what the layer gives for the whole text from scratch."""

    def __init__(self, proposer: MtpProposer) -> None:
        self.proposer, self.same, self.wrong = proposer, 0, list[object]()
        self._propose = proposer.propose
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found = self._propose(asks)
        for ask, (tokens, _) in zip(asks, found, strict=True):
            if tokens:
                skipped = self.proposer._texts[ask.request.request_id].skipped
                wanted = from_scratch(self.proposer, ask, len(tokens), skipped)
                if list(tokens) == wanted:
                    self.same += 1
                else:
                    self.wrong.append((ask.request.request_id, tokens, wanted))
        return found


def from_scratch(proposer: MtpProposer, ask: Ask, count: int, skipped: int) -> list[int]:
    """What the layer guesses when model and layer read the text in one pass each, from `skipped` on."""
    model, layer, text = proposer.model, proposer.layer, list(ask.request.tokens)
    before = model.hidden
    model.forward(
        one_pass(text[:-1], wanted=False), model.backend.kv_cache(KvSpec.of(model.spec, 8, "f32"), 30)
    )
    hidden, model.hidden = model.backend.to_numpy(model.hidden)[skipped:], before
    cache = layer.backend.kv_cache(KvSpec.of(layer.spec, 8, "f32"), 30)
    batch, guesses = one_pass(text[skipped + 1 :], skipped=skipped), list[int]()
    for number in ask.sampler.ahead(count):
        found = layer.forward(batch, hidden, cache)
        assert found is not None
        guesses.append(ask.sampler.guess(layer.backend.to_numpy(found.logits)[0], text + guesses, number))
        hidden = layer.backend.to_numpy(found.hidden)
        batch = one_pass(guesses[-1:], len(text) - 2 + len(guesses) - skipped, skipped)
    return guesses


def one_pass(tokens: Sequence[int], start: int = 0, skipped: int = 0, wanted: bool = True) -> Batch:
    """Rows of one text, in pages from 0 on, with logits of the last one if wanted."""
    rows, last = np.arange(len(tokens), dtype=np.int32), [len(tokens) - 1] if wanted else []
    sequence = Rows(0, len(tokens), start, np.arange(30, dtype=np.int32))
    positions = rows + np.int32(start + skipped)
    return Batch(np.array(tokens, np.int32), positions, (sequence,), np.array(last, np.int32))


@pytest.mark.parametrize(("name", "length"), [("moe", 4), ("mla", 1)])
def test_every_guess_is_that_of_the_whole_text(
    cpu_decoders: dict[str, Decoder], name: str, length: int
) -> None:
    """In chunks, in batches, after accepted and rejected guesses, greedy and sampled; bit by bit."""
    engine = with_layer(cpu_decoders[name], layer_of(cpu_decoders[name]), length)
    checked = Checked(proposer_of(engine))
    run(engine, requests(), random.Random(length))
    assert not checked.wrong and checked.same > 100


def test_several_engines_share_a_layer(cpu_decoders: dict[str, Decoder]) -> None:
    """In turns, as a benchmark's do: each step's hidden states go to the requests that it computed."""
    decoder = cpu_decoders["moe"]
    first = with_layer(decoder, layer_of(decoder))
    checked = Checked(proposer_of(first))
    engines = [first, make_engine(decoder), make_engine(decoder)]
    propose_by(engines[1], checked.proposer, 2)
    texts = [Request(str(place), prompt_of(20), replace(GREEDY, max_tokens=30)) for place in range(3)]
    for engine, text in zip(engines, texts, strict=True):
        engine.add(text)
    turns = random.Random(3)
    while any(engine.busy for engine in engines):
        turns.choice(engines).step()
        checked.proposer.check_integrity({text.request_id for text in texts if text.finish_reason is None})
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    assert not checked.wrong and checked.same > 20


def test_rows_that_wait_are_read_together(cpu_decoders: dict[str, Decoder]) -> None:
    """Where drafts begin late, nothing is missing, and no more rows wait than READ_AT."""
    engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]), length=0)
    proposer = proposer_of(engine)
    request = Request("late", prompt_of(20), replace(GREEDY, max_tokens=44))
    engine.add(request)
    unread = []
    for _ in range(34):
        engine.step()
        unread.append(proposer._texts["late"].unread)
    assert max(unread) == READ_AT and min(unread[2:]) == 1
    checked = Checked(proposer)
    propose_by(engine, proposer)
    while engine.busy:
        engine.step()
    assert not checked.wrong and checked.same >= 2


def test_a_shared_beginning(cpu_decoders: dict[str, Decoder]) -> None:
    """Of a prompt that begins like an earlier one, neither model nor layer computes the beginning again, and
    guesses are as good: the model computes one token more, whose hidden state the layer needs."""
    for common in (16, 21, 30):
        engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]))
        checked = Checked(proposer_of(engine))
        list(engine.generate(Request("one", prompt_of(40), GREEDY)))
        # The same tokens from the second on are not the same beginning.
        list(engine.generate(Request("other", [49, *prompt_of(40)[1:]], GREEDY)))
        second = Request("two", [*prompt_of(40)[:common], *prompt_of(9, 5)], replace(GREEDY, max_tokens=12))
        before = checked.same
        engine.add(second)
        engine.step()
        text = proposer_of(engine)._texts["two"]
        assert second.shared == common - 1 == text.own.shared and not text.skipped
        while engine.busy:
            engine.step()
            engine.check_integrity()
        assert not checked.wrong and checked.same > before


def test_the_next_turn_of_a_conversation(cpu_decoders: dict[str, Decoder]) -> None:
    """The rows of the last step are filled in; the layer goes on from there, and so does the turn after."""
    engine, turns = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"])), prompt_of(12)
    plain = make_engine(cpu_decoders["moe"])
    for turn in range(3):
        request = Request(f"{turn}", list(turns), GREEDY)
        wanted = list(plain.generate(Request(f"{turn}", list(turns), GREEDY)))
        engine.add(request)
        engine.step()
        text = proposer_of(engine)._texts[request.request_id]
        assert not text.skipped and (turn == 0 or request.shared - text.own.shared in range(1, 6))
        while engine.busy:
            engine.step()
        assert request.generated == wanted
        turns = [*request.tokens, *prompt_of(3, turn)]


def test_a_beginning_that_the_layer_never_saw(cpu_decoders: dict[str, Decoder]) -> None:
    """It starts behind it, at the right positions, and nobody shares its rows."""
    engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]), context=200, pages=80)
    speculator, engine.speculator = engine.speculator, None
    long = prompt_of(FILLED + 20)
    list(engine.generate(Request("unseen", [*long, 1], GREEDY)))
    engine.speculator = speculator
    checked = Checked(proposer_of(engine))
    for name in ("one", "two"):
        engine.add(Request(name, [*long, *prompt_of(20, 1)], GREEDY))
        engine.step()
        text = proposer_of(engine)._texts[name]
        assert text.skipped >= FILLED + 19 and text.own.shared == 0
        while engine.busy:
            engine.step()
            engine.check_integrity()
    assert not checked.wrong and checked.same > 5


def test_aborts_free_its_pages(cpu_decoders: dict[str, Decoder]) -> None:
    engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]))
    proposer = proposer_of(engine)
    check_aborts_free_pages(engine, proposer.pages)


def test_what_does_not_fit_goes_on_without_drafts(cpu_decoders: dict[str, Decoder]) -> None:
    """Pages for one request of three; a context shorter than the prompt, or ending within the answer."""
    decoder = cpu_decoders["moe"]
    for pages, context in ((6, 64), (100, 16), (100, 30)):
        engine, layer = make_engine(decoder), layer_of(decoder)
        propose_by(engine, MtpProposer(decoder, layer, KvSpec.of(layer.spec, 8, "f32"), pages, context))
        wanted = [Request(name, prompt_of(20, ord(name)), replace(GREEDY, max_tokens=20)) for name in "abc"]
        plain = run(make_engine(decoder), [replace(each, tokens=[], pages=[]) for each in wanted])
        assert facts(run(engine, wanted)) == facts(plain)


@pytest.mark.parametrize("method", ["propose", "follow"])
def test_a_layer_that_fails_ends_speculation_and_no_request(
    cpu_decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = with_layer(cpu_decoders["moe"], layer_of(cpu_decoders["moe"]))
    monkeypatch.setattr(proposer_of(engine), method, lambda *_: 1 / 0)
    plain = list(make_engine(cpu_decoders["moe"]).generate(Request("a", prompt_of(5), GREEDY)))
    with pytest.warns(RuntimeWarning, match="no more speculative decoding"):
        assert list(engine.generate(Request("a", prompt_of(5), GREEDY))) == plain


# A model whose next token is a permutation of the current one, and layers that know it.

SIZE = 32
ORDER = np.random.default_rng(2).permutation(SIZE)
NEXT = np.zeros((SIZE, SIZE), np.float32)  # row i + 1 of the text has its one where row i's token is
NEXT[ORDER, np.arange(SIZE)] = 1


class Rigged(TinyStore):
    """Embeddings are one-hot, attention and FFN add nothing, norms are even: hidden states tell the token.

    given: matrices by name.
    """

    def __init__(self, spec: ModelSpec, given: dict[str, NDArray[np.float32]]) -> None:
        super().__init__(spec)
        self.given = {names.EMBED: np.eye(SIZE, dtype=np.float32), names.HEAD: NEXT, **given}

    def matrix(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if name in self.given:
            return self.given[name]
        nothing = "norm" in name or "down" in name or "attn.out" in name
        return np.zeros(shape, np.float32) if nothing else super().matrix(name, shape)


@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_a_layer_that_is_right_is_always_accepted(cpu_decoders: dict[str, Decoder], reads: str) -> None:
    """By the next token alone, then by the hidden state alone: one place off in either, and all are wrong."""
    spec = moe_spec(vocab=SIZE, hidden=SIZE)
    backend = cpu_decoders["moe"].backend
    model = Decoder(spec, Rigged(spec, {}), backend)
    nothing, kept = np.zeros((SIZE, SIZE), np.float32), np.eye(SIZE, dtype=np.float32)
    joins = (kept, nothing) if reads == "token" else (nothing, NEXT)
    given = dict(zip((names.JOIN_EMBED, names.JOIN_HIDDEN), joins, strict=True))
    layer = FurtherLayer(further_spec(spec), Rigged(further_spec(spec), given), backend)
    engine = with_layer(model, layer, valid_tokens=SIZE)
    asked = [Request(f"{i}", [token % SIZE for token in prompt_of(5 + i, i)], LONG) for i in range(4)]
    run(engine, asked, random.Random(4))
    for request in asked:
        steps = zip(request.tokens[len(request.prompt) - 1 :], request.generated, strict=False)
        assert all(ORDER[token] == after for token, after in steps)
    assert engine.speculator is not None
    figures = engine.speculator.figures
    assert figures.tested_at[0] > 20 and figures.acceptance == 1.0
    assert figures.tokens_per_forward > 4


def test_traffic_that_shares_aborts_and_runs_out_of_pages(cpu_decoders: dict[str, Decoder]) -> None:
    """Pages are forgotten and taken anew all the time; texts stay what they are, and no page is lost."""
    decoder, chosen = cpu_decoders["moe"], random.Random(6)
    beginnings = [prompt_of(30, seed) for seed in range(3)]
    prompts = [
        [*chosen.choice(beginnings)[: chosen.randrange(5, 31)], *prompt_of(chosen.randrange(4), seed)]
        for seed in range(40)
    ]
    asked = [replace(GREEDY, max_tokens=chosen.randrange(1, 12)) for _ in prompts]
    plain = make_engine(decoder)
    pairs = list(zip(prompts, asked, strict=True))
    wanted = [list(plain.generate(Request("plain", each, how))) for each, how in pairs]
    engine, layer = make_engine(decoder, pages=22), layer_of(decoder)
    propose_by(engine, MtpProposer(decoder, layer, KvSpec.of(layer.spec, 8, "f32"), 14, 64))
    waiting = [Request(f"{i}", each, how) for i, (each, how) in enumerate(pairs)]
    aborted, requests_of = set[str](), list(waiting)
    while waiting or engine.busy:
        while waiting and (not engine.busy or chosen.random() < 0.5):
            engine.add(waiting.pop(0))
        if chosen.random() < 0.1 and engine.scheduler.running:
            victim = chosen.choice(engine.scheduler.running).request_id
            aborted.add(victim)
            engine.abort(victim)
        engine.step()
        engine.check_integrity()
    for request, text in zip(requests_of, wanted, strict=True):
        end = len(request.generated)
        assert request.generated == text[:end] and (end == len(text) or request.request_id in aborted)
    proposer = proposer_of(engine)
    assert proposer.pages.free == proposer.pages.total and len(aborted) > 2
    assert engine.speculator is not None and engine.speculator.figures.proposed > 100
