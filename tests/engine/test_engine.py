"""The engine on a tiny random model with the reference backend: texts, ends, aborts, figures."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import GREEDY, SPECS, make_engine, prompt_of
from tiny_model import VOCAB, TinyStore, moe_spec

from strata.backends.reference import ReferenceBackend
from strata.core import FinishReason, Request, SamplingParams
from strata.engine.engine import Engine
from strata.errors import CapacityError, ContextOverflowError, NumericalError, RequestError
from strata.model.decoder import Decoder


def mixed_requests() -> list[Request]:
    """Greedy and sampled, short and long, one of a single token."""
    sampled = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=7, max_tokens=12)
    return [
        Request("one token", [3], GREEDY),
        Request("long", prompt_of(40, 1), replace(GREEDY, max_tokens=6)),
        Request("sampled", prompt_of(5, 2), sampled),
        Request("same prompt, other seed", prompt_of(5, 2), replace(sampled, seed=8)),
        Request("penalized", prompt_of(9, 3), replace(GREEDY, repeat_penalty=1.8, repeat_last_n=-1)),
        Request("filtered", prompt_of(17, 4), SamplingParams(temperature=0.9, seed=1, max_tokens=9)),
    ]


def run(
    engine: Engine, requests: list[Request], arrivals: random.Random | None = None
) -> dict[str, list[int]]:
    """All answers; requests arrive at once, or one by one between steps."""
    waiting, answers = list(requests), {request.request_id: [] for request in requests}
    while waiting or engine.busy:
        while waiting and (arrivals is None or not engine.busy or arrivals.random() < 0.3):
            engine.add(waiting.pop(0))
        for event in engine.step():
            if event.token is not None:
                answers[event.request.request_id].append(event.token)
        engine.check_integrity()
    return answers


@pytest.mark.parametrize("name", SPECS)
def test_batch_mates_change_nothing(any_decoders: dict[str, Decoder], name: str) -> None:
    """case-26, case-25: greedy and sampled requests together give each what it gets alone, to the token."""
    alone = {}
    for request in mixed_requests():
        alone.update(run(make_engine(any_decoders[name]), [request]))
    assert run(make_engine(any_decoders[name]), mixed_requests()) == alone
    assert run(make_engine(any_decoders[name]), mixed_requests(), random.Random(4)) == alone
    assert alone["sampled"] != alone["same prompt, other seed"]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8", "int8g32"])
def test_chunks_change_no_bit_of_the_logits(
    any_decoders: dict[str, Decoder], name: str, kv_dtype: str
) -> None:
    """Also with batch mates that are in another phase."""
    seen = []
    for chunk, mates in ((64, 0), (7, 0), (1, 0), (7, 3)):
        engine = make_engine(any_decoders[name], chunk=chunk, kv_dtype=kv_dtype)
        for mate in range(mates):
            engine.add(Request(f"mate {mate}", prompt_of(5 * mate + 1, mate), GREEDY))
        seen.append(logits_of(engine, Request("a", prompt_of(33), replace(GREEDY, max_tokens=1))))
    assert all((logits == seen[0]).all() for logits in seen[1:])


def logits_of(engine: Engine, request: Request) -> np.ndarray:
    """The logits that the request's first token is sampled from."""
    engine.add(request)
    while engine.busy:
        works = engine.scheduler.schedule()
        found = engine.executor.run(works)
        for rows, work in zip(found, works, strict=True):
            if work.completes and work.request is request:
                return rows[0].copy()
            if work.completes:
                work.request.tokens.append(int(rows[0].argmax()))
    raise AssertionError("the request was never computed")


def test_same_seed_same_text_whatever_runs_beside(any_decoders: dict[str, Decoder]) -> None:
    """case-26: the same request five times with seed 42, alone and with seven others."""
    sampling = SamplingParams(temperature=1.5, seed=42, top_k=0, max_tokens=16)
    texts = set()
    for mates in (0, 7):
        for _ in range(2):
            engine = make_engine(any_decoders["moe"], pages=64)
            others = [
                Request(f"m{i}", prompt_of(4 + i, i), SamplingParams(temperature=1.5, seed=i, max_tokens=8))
                for i in range(mates)
            ]
            texts.add(tuple(run(engine, [*others, Request("a", prompt_of(6), sampling)])["a"]))
    assert len(texts) == 1
    other = run(make_engine(any_decoders["moe"]), [Request("a", prompt_of(6), replace(sampling, seed=None))])
    assert tuple(other["a"]) not in texts


# How requests end


def test_max_tokens(engine: Engine) -> None:
    request = Request("a", prompt_of(5), GREEDY)
    assert len(list(engine.generate(request))) == 10
    assert request.finish_reason is FinishReason.LENGTH and len(request.generated) == 10


def test_max_tokens_zero_ends_at_once(engine: Engine) -> None:
    """case-27."""
    request = Request("a", prompt_of(5), replace(GREEDY, max_tokens=0))
    assert list(engine.generate(request)) == []
    assert request.finish_reason is FinishReason.LENGTH and engine.metrics.steps == 0


def test_a_stop_id_ends_the_answer_and_is_no_part_of_it(engine: Engine) -> None:
    answer = list(engine.generate(Request("a", prompt_of(5), GREEDY)))
    stop = answer[4]
    request = Request("b", prompt_of(5), GREEDY, stop_ids=frozenset({stop, VOCAB + 7}))
    assert list(engine.generate(request)) == answer[: answer.index(stop)]
    assert request.finish_reason is FinishReason.STOP and request.tokens[-1] == stop


def test_ignored_stop_ids_never_come(engine: Engine) -> None:
    answer = list(engine.generate(Request("a", prompt_of(5), GREEDY)))
    sampling = replace(GREEDY, ignore_eos=True)
    request = Request("b", prompt_of(5), sampling, stop_ids=frozenset({answer[0]}))
    other = list(engine.generate(request))
    assert len(other) == 10 and answer[0] not in other


@pytest.mark.parametrize("max_tokens", [2000, None])
def test_a_full_context_is_a_clean_end(engine: Engine, max_tokens: int | None) -> None:
    """case-31: generation stops at the context with LENGTH, once, and the engine goes on."""
    request = Request("a", prompt_of(50), replace(GREEDY, max_tokens=max_tokens, ignore_eos=True))
    assert len(list(engine.generate(request))) == 14
    assert request.finish_reason is FinishReason.LENGTH and len(request.tokens) == 64
    assert len(list(engine.generate(Request("b", prompt_of(5), GREEDY)))) == 10


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(engine: Engine, length: int) -> None:
    """case-21."""
    with pytest.raises(ContextOverflowError, match=f"{length} tokens but the context holds 64"):
        engine.add(Request("a", prompt_of(length), GREEDY))
    assert len(list(engine.generate(Request("b", prompt_of(63), GREEDY)))) == 1


def test_requests_that_cannot_be(engine: Engine, decoders: dict[str, Decoder]) -> None:
    """case-11 (an empty prompt cannot even be made into a Request), foreign ids, an id in use."""
    with pytest.raises(RequestError, match="empty"):
        Request("a", [], GREEDY)
    for bad in (VOCAB, -1):
        with pytest.raises(RequestError, match="the vocabulary is 0 to 49"):
            engine.add(Request("a", [1, bad], GREEDY))
    with pytest.raises(CapacityError, match="8 KV pages, there are 4"):
        make_engine(decoders["moe"], pages=4).add(Request("a", [1], SamplingParams()))
    engine.add(Request("a", [1], GREEDY))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(Request("a", [2], GREEDY))
    engine.abort("a")


class BrokenRow:
    """A backend whose logits are NaN for one token id as input."""

    def __init__(self, decoder: Decoder, token: int) -> None:
        self.decoder, self.token = decoder, token
        self.backend, self.spec = decoder.backend, decoder.spec

    def __getattr__(self, name: str) -> object:
        return getattr(self.decoder, name)

    def forward(self, batch: object, cache: object) -> object:
        logits = self.decoder.forward(batch, cache)
        logits[torch.from_numpy(batch.token_ids[batch.logit_rows] == self.token)] = torch.nan
        return logits


def test_nan_logits_end_their_request_only(decoders: dict[str, Decoder]) -> None:
    """case-25: NaN logits -> that request ends with an error, others go on."""
    engine = make_engine(BrokenRow(decoders["moe"], token=9))
    bad, good = Request("bad", [9], GREEDY), Request("good", [3], replace(GREEDY, max_tokens=3))
    answers = run(engine, [bad, good])
    assert answers["bad"] == [] and len(answers["good"]) == 3
    assert bad.finish_reason is FinishReason.ERROR and isinstance(bad.error, NumericalError)
    assert good.finish_reason is FinishReason.LENGTH
    with pytest.raises(NumericalError):
        list(engine.generate(Request("again", [9], GREEDY)))
    engine.check_integrity()


def test_what_goes_wrong_in_a_batch_ends_its_requests_only(decoders: dict[str, Decoder]) -> None:
    """Their pages come back, a request that waited is computed, the next ones too."""
    engine = make_engine(decoders["moe"], max_running=2)
    first, second, waiting = (Request(name, prompt_of(5, i), GREEDY) for i, name in enumerate("abc"))
    for request in (first, second, waiting):
        engine.add(request)
    engine.step()
    run_once, engine.executor.run = engine.executor.run, lambda works: 1 // 0  # type: ignore[method-assign]
    assert [(event.request, event.token) for event in engine.step()] == [(first, None), (second, None)]
    engine.executor.run = run_once  # type: ignore[method-assign]
    for request in (first, second):
        assert request.finish_reason is FinishReason.ERROR and isinstance(request.error, ZeroDivisionError)
        assert request.pages == []
    engine.check_integrity()
    alone = run(make_engine(decoders["moe"]), [Request("c", prompt_of(5, 2), GREEDY)])
    while engine.busy:
        engine.step()
    assert waiting.generated == alone["c"]
    engine.check_integrity()


def test_generate_raises_what_went_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", lambda works: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            list(engine.generate(Request("a", prompt_of(5), GREEDY)))
    assert len(list(engine.generate(Request("b", prompt_of(5), GREEDY)))) == 10


def test_vocabulary_padded_past_the_tokenizer(decoders: dict[str, Decoder]) -> None:
    """Rows of the embedding that no token belongs to are never answered with, however likely."""
    free = list(make_engine(decoders["moe"]).generate(Request("a", [3], replace(GREEDY, max_tokens=30))))
    limit = sorted(free)[len(free) // 2]
    assert max(free) >= limit > 0, "the test needs an answer that uses the last ids"
    engine = make_engine(decoders["moe"], valid_tokens=limit)
    for sampling in (
        GREEDY,
        SamplingParams(temperature=50.0, seed=1, top_k=0, top_p=1, min_p=0, max_tokens=50),
    ):
        answer = list(engine.generate(Request("b", [3], sampling)))
        assert answer and max(answer) < limit


# Aborts


def test_abort_in_every_phase_frees_the_pages(engine: Engine) -> None:
    """case-20: 50 requests aborted while waiting, in the prompt, after the first token; then a normal one."""
    expected = list(make_engine(engine.decoder).generate(Request("x", prompt_of(6), GREEDY)))
    for turn in range(50):
        request = Request(f"r{turn}", prompt_of(40, turn), SamplingParams(seed=1, temperature=1.0))
        engine.add(request)
        for _ in range(turn % 5):
            engine.step()
        assert engine.abort(request.request_id) and not engine.abort(request.request_id)
        assert request.finish_reason is FinishReason.ABORT and request.pages == []
        assert engine.pages.free == engine.pages.unpromised == engine.pages.total
        engine.check_integrity()
    assert list(engine.generate(Request("x", prompt_of(6), GREEDY))) == expected


def test_stop_is_asked_between_the_chunks_of_a_prompt(decoders: dict[str, Decoder]) -> None:
    """case-45: Ctrl-C during a long prompt must not wait for the first token."""
    engine = make_engine(decoders["moe"], chunk=8)
    request = Request("a", prompt_of(40), GREEDY)
    assert list(engine.generate(request, stop=lambda: engine.metrics.steps == 2)) == []
    assert request.finish_reason is FinishReason.ABORT and request.computed == 16
    assert engine.pages.free == engine.pages.total and not engine.busy
    assert len(list(engine.generate(Request("b", prompt_of(5), GREEDY), stop=lambda: False))) == 10


def test_closing_generate_aborts(engine: Engine) -> None:
    request = Request("a", prompt_of(5), GREEDY)
    tokens = engine.generate(request)
    next(tokens)
    tokens.close()
    assert request.finish_reason is FinishReason.ABORT and not engine.busy


def test_generate_does_nothing_before_it_is_iterated(engine: Engine) -> None:
    engine.generate(Request("a", prompt_of(5), GREEDY))
    assert not engine.busy


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_loses_nothing(seed: int) -> None:
    """Arrivals, aborts, over-long prompts and few pages: every request ends and every page comes back."""
    rng = random.Random(seed)
    spec = moe_spec(1, moe_layers=(), experts=None)
    engine = make_engine(Decoder(spec, TinyStore(spec), ReferenceBackend()), pages=12, max_running=3)
    requests: list[Request] = []
    for turn in range(60):
        if rng.random() < 0.4:
            sampling = SamplingParams(temperature=1.0, seed=turn, max_tokens=rng.randint(0, 20))
            request = Request(f"r{turn}", prompt_of(rng.randint(1, 70), turn), sampling)
            try:
                engine.add(request)
                requests.append(request)
            except ContextOverflowError:
                assert len(request.prompt) >= 64
        if requests and rng.random() < 0.15:
            engine.abort(rng.choice(requests).request_id)
        engine.step()
        engine.check_integrity()
    while engine.busy:
        engine.step()
    engine.check_integrity()
    assert len(requests) > 10 and all(request.finish_reason is not None for request in requests)
