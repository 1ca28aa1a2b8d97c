"""Requests that begin alike share KV pages, and nobody can tell from the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import GREEDY, make_engine, prompt_of

from strata.core import Request
from strata.engine.engine import Engine
from strata.model.decoder import Decoder


def test_sharing_a_beginning_changes_no_token(any_decoders: dict[str, Decoder]) -> None:
    """A conversation in three turns, and a second one that branches off; int8 KV, pages of 8."""
    for decoder in any_decoders.values():
        answers: dict[bool, list[list[int]]] = {}
        for share in (True, False):
            engine = make_engine(decoder, kv_dtype="int8", share_prefixes=share)
            answers[share], shared = [], []
            text = prompt_of(13)
            for turn, words in enumerate(([], [5, 6, 7], [8])):
                text += words
                branch = Request(f"branch {turn}", [*text[:12], 9, 9], GREEDY)
                request = Request(f"turn {turn}", list(text), replace(GREEDY, max_tokens=7))
                for each in (request, branch):
                    answers[share].append(list(engine.generate(each)))
                    shared.append(each.shared)
                text = request.tokens
            assert shared == ([0, 12, 19, 13, 29, 13] if share else [0] * 6)
            engine.check_integrity()
        assert answers[True] == answers[False]


def test_an_interrupt_before_the_copy_spoils_no_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the promise of a shared page and its copy: the page is not found."""
    first, second = prompt_of(13), [*prompt_of(13)[:12], 9, 9]
    list(engine.generate(Request("first", first, GREEDY)))
    expected = list(engine.generate(Request("before", second, GREEDY)))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    third = [*first[:11], 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder.backend, "copy_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(Request("interrupted", third, GREEDY)))
    assert list(engine.generate(Request("again", second, GREEDY))) == expected
    fresh = make_engine(engine.decoder, share_prefixes=False)
    answer = list(engine.generate(Request("third", third, GREEDY)))
    assert answer == list(fresh.generate(Request("third", third, GREEDY)))
