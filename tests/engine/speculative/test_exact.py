"""With drafts, good or bad, every request gets what it gets without: tokens, logprobs, end (case-29)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engines import GREEDY, SPECS, make_engine, prompt_of
from tiny_model import VOCAB

from strata.core import Request, SamplingParams
from strata.engine.engine import Engine, Event
from strata.engine.scheduler import Work
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator
from strata.memory.kv_pages import KvPages
from strata.model.decoder import Decoder

SAMPLED = SamplingParams(temperature=1.2, top_k=0, top_p=0.95, min_p=0.01, seed=7, max_tokens=30)
LONG = replace(GREEDY, max_tokens=40)


class Oracle:
    """Knows the answers, and lies about each token with a given chance."""

    name, free, follows = "oracle", True, False

    def __init__(self, answers: dict[str, list[int]], lies: float, seed: int = 0) -> None:
        self.answers, self.lies, self.random = answers, lies, random.Random(seed)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal(tuple(self._tokens(ask))) for ask in asks]

    def _tokens(self, ask: Ask) -> list[int]:
        done = len(ask.request.generated)
        told = self.answers[ask.request.request_id][done : done + ask.count]
        return [self.random.randrange(VOCAB) if self.random.random() < self.lies else t for t in told]

    def glance(self, request: Request) -> int:
        """Nothing is known beforehand."""
        return 0

    def behind(self, request: Request) -> int | None:
        return 0

    def read(self, request: Request, count: int) -> None: ...

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def check_integrity(self, running: set[str]) -> None: ...


def check_aborts_free_pages(engine: Engine, pages: KvPages) -> None:
    """Three requests are given up while a proposer holds pages for them; none may stay with it."""
    for name in "abc":
        engine.add(Request(name, prompt_of(20, ord(name)), LONG))
    for _ in range(8):
        engine.step()
    assert pages.free < pages.total
    for name in "abc":
        engine.abort(name)
        engine.check_integrity()
    assert pages.free == pages.total


def requests() -> list[Request]:
    """Greedy and sampled, with penalties, bias, logprobs, a stop id, prompts that repeat."""
    return [
        Request("ones", [1, 1, 1], LONG),
        Request("cycle", [3, 4, 5, 6] * 5, LONG),
        Request("sampled", prompt_of(5, 2), SAMPLED),
        Request("seeded", [7, 8] * 6, replace(SAMPLED, temperature=0.3, seed=8), logprobs=3),
        Request("penalized", [9, 9, 2] * 4, replace(LONG, repeat_penalty=1.4, repeat_last_n=-1)),
        Request("stopped", [1, 2] * 9, replace(SAMPLED, seed=3), frozenset(range(0, VOCAB, 9))),
        Request("biased", [5, 1], replace(LONG, frequency_penalty=0.6), logit_bias={3: 4.0, 4: 4.0}),
        Request("to the end of the context", prompt_of(50, 3), replace(LONG, max_tokens=None)),
        Request("scored", prompt_of(9, 4), replace(LONG, max_tokens=5), logprobs=1, scored=True),
    ]


def run(
    engine: Engine, wanted: list[Request], arrivals: random.Random | None = None
) -> dict[str, list[Event]]:
    waiting, news = list(wanted), {request.request_id: list[Event]() for request in wanted}
    while waiting or engine.busy:
        while waiting and (arrivals is None or not engine.busy or arrivals.random() < 0.3):
            engine.add(waiting.pop(0))
        for event in engine.step():
            news[event.request.request_id].append(event)
        engine.check_integrity()
    return news


def facts(news: dict[str, list[Event]]) -> dict[str, object]:
    """All that a caller sees of each request."""
    return {
        name: ([(event.token, event.logprob, event.finish) for event in events], events[0].request.tokens)
        for name, events in news.items()
    }


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_no_draft_changes_anything(cpu_decoders: dict[str, Decoder], name: str, kv_dtype: str) -> None:
    """Alone and in batches; drafts that are right, half wrong, all wrong; n-grams."""
    compare(cpu_decoders[name], kv_dtype, [(0.0, 8), (0.2, 16), (1.0, 3)], [1, 5])


def test_no_draft_changes_anything_in_the_reference(decoders: dict[str, Decoder]) -> None:
    compare(decoders["moe"], "f32", [(0.2, 4)], [8])


def compare(decoder: Decoder, kv_dtype: str, oracles: list[tuple[float, int]], ngrams: list[int]) -> None:
    """Plain decoding, each request alone, against batches with drafts; lies and lengths, lengths."""
    alone: dict[str, list[Event]] = {}
    for request in requests():
        alone.update(run(make_engine(decoder, kv_dtype=kv_dtype), [request]))
    answers = {name: events[0].request.generated for name, events in alone.items()}
    proposers = [(Oracle(answers, lies), length) for lies, length in oracles]
    for proposer, length in [*proposers, *((NgramProposer(), length) for length in ngrams)]:
        engine = make_engine(decoder, kv_dtype=kv_dtype)
        engine.speculator = speculator = Speculator(proposer, LengthOptions(length, fixed=True), None)
        assert facts(run(engine, requests(), random.Random(length))) == facts(alone)
        figures = speculator.figures
        assert figures.proposed >= 10
        if isinstance(proposer, Oracle):
            assert figures.acceptance == pytest.approx(1 - proposer.lies, abs=0.1)


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_512_tokens_of_ones(cpu_decoders: dict[str, Decoder], length: int) -> None:
    """case-29: long runs degenerated where short tests passed; the prompt is [1, 1, 1]."""
    changes = {"context": 600, "pages": 80, "kv_dtype": "int8"}
    texts = []
    for speculator in (None, Speculator(NgramProposer(), LengthOptions(length, fixed=True), None)):
        engine = make_engine(cpu_decoders["moe"], **changes)
        engine.speculator = speculator
        texts.append(list(engine.generate(Request("a", [1, 1, 1], replace(GREEDY, max_tokens=512)))))
    assert len(texts[0]) == 512
    assert texts[0] == texts[1]


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_an_end_inside_an_accepted_run(cpu_decoders: dict[str, Decoder], length: int) -> None:
    """case-29: max_tokens or a stop id inside a run of accepted tokens; a draft that knows all of it."""
    decoder = cpu_decoders["moe"]
    (long,) = run(make_engine(decoder), [Request("long", prompt_of(7), LONG)]).values()
    told = long[0].request.generated
    wanted = [
        *(
            Request(f"{count} tokens", prompt_of(7), replace(LONG, max_tokens=count))
            for count in range(1, 20)
        ),
        *(Request(f"stop {place}", prompt_of(7), LONG, frozenset((told[place],))) for place in range(19)),
    ]
    alone: dict[str, list[Event]] = {}
    for request in wanted:
        again = replace(request, tokens=[], pages=[])
        alone |= run(make_engine(decoder), [again])
    engine = make_engine(decoder, pages=400)
    oracle = Oracle({request.request_id: told for request in wanted}, 0.0)
    engine.speculator = Speculator(oracle, LengthOptions(length, fixed=True), None)
    assert facts(run(engine, wanted)) == facts(alone)
