"""How often it is asked whether drafts would pay, and what a glance at the text says instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from engines import make_engine
from hypothesis import given
from hypothesis import strategies as st
from simulated import ENDLESS, Drafts, Matches, decode, measured_cost, runs, slowest_window, speed

from strata.core import FinishReason, Request
from strata.engine.metrics import Phase
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import WINDOW_FLOOR
from strata.engine.speculative.ngram import LONGEST, NgramProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator
from strata.model.decoder import Decoder

THINKING = 0.2
"""Plain steps that asking takes: about what it does for a model whose step takes 0.35 ms."""


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_a_glance_knows_how_much_matches(tokens: list[int], data: st.DataObject) -> None:
    """However seldom it is taken: by a slow walk along the text."""
    proposer, request = NgramProposer(), Request("a", tokens[:1], ENDLESS)
    for token in tokens[1:]:
        request.tokens.append(token)
        if data.draw(st.booleans()):
            assert proposer.glance(request) == min(walked(request.tokens), LONGEST).bit_length()
    assert proposer.glance(request) == min(walked(request.tokens), LONGEST).bit_length()


def walked(tokens: list[int]) -> int:
    """See `ngram._Text.matched`."""
    place, found = None, 0
    for end in range(1, len(tokens)):
        if place is not None and tokens[place] == tokens[end]:
            place, found = place + 1, found + 1
        else:
            pair, found = tokens[end - 1 : end + 1], 0
            place = next((at for at in range(end, 1, -1) if tokens[at - 2 : at] == pair), None)
    return 0 if place is None else 2 + found


def test_what_has_nothing_to_propose_is_not_asked() -> None:
    """A text without two tokens that were there before: after the first time nobody asks."""
    speculator = decode(Silent(lambda *_: False), lambda rows: 1.0, lambda rows: 1.0, 300, thinking=0.5)[1]
    assert speculator.figures.draft_seconds < 2.0


class Silent(Matches):
    """Never has anything to propose."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal()] * len(asks)

    def glance(self, request: Request) -> int:
        return 0


@pytest.mark.parametrize("model", ["demo", "SmolLM2"])
def test_texts_that_repeat_are_noticed_although_asking_is_dear(model: str) -> None:
    """Glanced at every eighth step only while they do not, they still gain what fixed lengths do."""
    for text in (runs(150, 8), runs(40, 10), [True] * 6000):
        right, cost = (lambda _, position, text=text: text[position % len(text)]), measured_cost(model)
        steps, _ = decode(Matches(right), cost, cost, 400, thinking=THINKING)
        for length in (4, 8):
            fixed = LengthOptions(length, fixed=True)
            assert speed(steps) >= speed(decode(Matches(right), cost, None, 400, lengths=fixed)[0])
        assert slowest_window(steps, 1.0, "0") >= WINDOW_FLOOR


def test_who_decodes_beside_a_prompt_is_asked_about() -> None:
    """Steps of as many requests as decode were measured: that another one's prompt is computed beside them
    makes them none of an unknown number."""
    cost = measured_cost("SmolLM2")
    speculator = decode(Matches(lambda *_: True), cost, cost, 20)[1]
    known, new = Request("0", [0] * 2, ENDLESS), Request("1", [0] * 2000, ENDLESS)
    known.tokens.append(0)
    known.computed = 2
    assert not speculator.rests([known, new], Phase())
    new.computed = 2000
    assert speculator.rests([known, new], Phase())  # of two nothing is known


@pytest.mark.parametrize("thinking", [0.02, 0.08])
def test_what_asking_takes_costs_what_it_takes(thinking: float) -> None:
    """Short runs gain from being asked about at every step; that costs no more than the asking itself."""
    text, cost = runs(12, 8), measured_cost("SmolLM2")
    found = [
        speed(decode(Matches(lambda _, position: text[position]), cost, cost, 600, thinking=each)[0])
        for each in (0.0, thinking)
    ]
    assert found[1] >= found[0] / (1 + 2 * thinking)


def test_a_draft_that_has_read_proposes_at_once() -> None:
    """Before the text has gone on, and it would have to read again."""
    cost = measured_cost("random MoE")
    steps, _ = decode(Drafts(lambda *_: True, 0.05), cost, cost, 200, prompt=40, thinking=THINKING)
    assert speed(steps) > 3.0


def test_steps_that_rest_are_counted(cpu_decoders: dict[str, Decoder]) -> None:
    """All forwards and tokens when the last request has ended, however it ended; no time between requests."""
    engine = make_engine(cpu_decoders["moe"])
    now = count(0.0, 0.001)  # each look at the clock is a millisecond: asking takes more than a step
    speculator = Speculator(
        NgramProposer(), LengthOptions(), lambda rows, **_: float(rows), lambda: next(now)
    )
    engine.speculator = speculator
    decoded = engine.metrics.total.decode
    for name, tokens in (("a", 40), ("b", 23), ("c", 61)):
        for _ in engine.generate(Request(name, [3, 4, 5], replace(ENDLESS, max_tokens=tokens))):
            pass
        assert sum(speculator.figures.lengths) == speculator.figures.forwards
        assert speculator.figures.tokens == decoded.tokens
        assert speculator.figures.verify_seconds < 10
    assert speculator.figures.forwards > speculator.figures.drafted
    engine.check_integrity()


def test_nothing_of_requests_that_were_cut_off_is_left_to_count(cpu_decoders: dict[str, Decoder]) -> None:
    """By an abort, or by a step that fails; what then passes until the next one is no step's time."""
    engine, now = make_engine(cpu_decoders["moe"]), count(0.0, 0.001)
    speculator = Speculator(
        NgramProposer(), LengthOptions(), lambda rows, **_: float(rows), lambda: next(now)
    )
    engine.speculator = speculator
    for tokens in range(1, 30):
        request = Request("a", [3, 4, 5], replace(ENDLESS, max_tokens=40))
        engine.add(request)
        while len(request.generated) < tokens:
            engine.step()
        if tokens % 2:
            engine.abort("a")
        else:
            run_once, engine.executor.run = engine.executor.run, lambda works: 1 // 0  # type: ignore[method-assign]
            assert engine.step()[0].finish is FinishReason.ERROR
            engine.executor.run = run_once  # type: ignore[method-assign]
        assert sum(speculator.figures.lengths) == speculator.figures.forwards
        assert speculator.figures.tokens == engine.metrics.total.decode.tokens
    engine.check_integrity()


def test_a_glance_that_fails_ends_drafts_and_no_request(cpu_decoders: dict[str, Decoder]) -> None:
    """Steps go on without them."""
    engine, now = make_engine(cpu_decoders["moe"]), count(0.0, 0.001)
    request = Request("a", [3, 4, 5], replace(ENDLESS, max_tokens=40))
    plain = list(engine.generate(replace(request, tokens=[], pages=[])))
    engine.speculator = Speculator(Blind(), LengthOptions(), lambda rows, **_: float(rows), lambda: next(now))
    with pytest.warns(RuntimeWarning, match="no more speculative decoding"):
        assert list(engine.generate(request)) == plain
    assert engine.speculator is None


class Blind(NgramProposer):
    """Has lost what it knew of a text."""

    def glance(self, request: Request) -> int:
        raise KeyError(request.request_id)


def test_n_grams_stand_in_for_a_dear_draft_model_where_asking_is_dear_too() -> None:
    """Idle asking about the draft model does not raise what is wanted of n-grams for good."""
    text, cost = runs(60, 20), measured_cost("demo")
    drafts, spare = Drafts(lambda *_: False, 1.0, 0.2), Matches(lambda _, position: text[position])
    steps, _ = decode(drafts, cost, cost, 800, spare=spare, thinking=THINKING)
    fixed = LengthOptions(8, fixed=True)
    assert speed(steps) >= 0.9 * speed(decode(spare, cost, None, 800, lengths=fixed)[0])
