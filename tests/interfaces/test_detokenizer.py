"""Streaming: whole characters, no stop string, the same text as in one piece."""

from __future__ import annotations

import time

import pytest
import toy_tokenizer as toy
from hangs import soon
from hypothesis import example, given
from hypothesis import strategies as st

from strata.errors import RequestError
from strata.interfaces.detokenizer import Detokenizer, StopMatcher
from strata.interfaces.tokenizer import Tokenizer

TOKENIZERS = {"byte level": toy.byte_level, "sentencepiece": toy.sentencepiece_bpe}
kinds = pytest.mark.parametrize("kind", sorted(TOKENIZERS))


def pieces_of(tokenizer: Tokenizer, ids: list[int], continuation: bool = False) -> list[str]:
    stream = Detokenizer(tokenizer, continuation=continuation)
    return [*(stream.add(i) for i in ids), stream.flush()]


@kinds
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    """Any ids at all: random bytes included, as a small model produces them."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    continuation = data.draw(st.booleans())
    assert "".join(pieces_of(tokenizer, ids, continuation)) == tokenizer.decode(
        ids, continuation=continuation
    )


@kinds
@given(text=st.text(max_size=30))
@example(text="\u2581")
def test_no_piece_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    # SentencePiece writes a space as U+2581, so one that a user types comes back as a space.
    assert "".join(pieces) == (text.replace("\u2581", " ") if kind == "sentencepiece" else text)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@kinds
def test_an_emoji_of_many_tokens_comes_out_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("\U0001f9ff")
    assert len(ids) >= 3
    shown = [piece for piece in pieces_of(tokenizer, ids) if piece]
    assert shown == ["\U0001f9ff"]


@kinds
def test_a_cut_character_is_shown_as_damaged_at_the_end(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("\U0001f9ff")[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert pieces[:-1] == [""] * len(ids) and set(pieces[-1]) == {"\ufffd"}


def test_leading_space_of_an_answer_and_of_a_continuation() -> None:
    tokenizer = toy.sentencepiece_bpe()
    ids = tokenizer.encode("The fox")
    assert "".join(pieces_of(tokenizer, ids)) == "The fox"
    assert "".join(pieces_of(tokenizer, ids, continuation=True)) == " The fox"


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    tokenizer = toy.byte_level()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. ") * 4000
    stream = Detokenizer(tokenizer)

    def seconds(part: list[int]) -> float:
        start = time.perf_counter()
        for token_id in part:
            stream.add(token_id)
        return time.perf_counter() - start

    tenth = len(ids) // 10
    first = seconds(ids[:tenth])
    seconds(ids[tenth:-tenth])
    assert seconds(ids[-tenth:]) < 5 * first + 0.1


def matched(text: str, stops: list[str], size: int) -> tuple[str, bool]:
    """The text shown when it arrives in pieces of `size` characters."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.add(text[i : i + size]) for i in range(0, len(text), size))
    return shown + matcher.flush(), matcher.stopped


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: the shortest prefix that ends with a stop string, without the longest such stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.integers(1, 6),
)
def test_stop_does_not_depend_on_how_text_arrives(text: str, stops: list[str], size: int) -> None:
    """case-15"""
    assert matched(text, stops, size) == expected(text, stops)


@given(st.text("ab", max_size=40), st.text("ab", min_size=1, max_size=6))
def test_text_is_held_back_only_while_it_may_become_a_stop(text: str, stop: str) -> None:
    """case-15: what is held is always the longest beginning of a stop string that the text ends with."""
    matcher, shown = StopMatcher([stop]), ""
    for position, letter in enumerate(text):
        shown += matcher.add(letter)
        if matcher.stopped:
            break
        seen = text[: position + 1]
        held = max(n for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("A B C O P Q R", ["O P Q"], "A B C ", True),
        ("O P R", ["O P Q"], "O P R", False),
        ("ends with O P", ["O P Q"], "ends with O P", False),
        ("aab", ["ab"], "a", True),
        ("x 😀 y", ["😀"], "x ", True),
        ("abcd", ["c", "abcd"], "ab", True),
        ("abc", ["bc", "abc"], "", True),
        ("12345", ["9", "8", "7", "6", "5"], "1234", True),
        ("text", [], "text", False),
    ],
)
def test_stop_cases(text: str, stops: list[str], shown: str, stopped: bool) -> None:
    """case-15"""
    assert matched(text, stops, 1) == (shown, stopped)


def test_stop_inside_a_character_of_several_tokens() -> None:
    """case-15: the stop is found although no token is a character."""
    tokenizer = toy.byte_level()
    stream, matcher, shown = Detokenizer(tokenizer), StopMatcher(["\U0001f9ff!"]), ""
    for token_id in tokenizer.encode("ok \U0001f9ff!no"):
        shown += matcher.add(stream.add(token_id))
    assert (shown, matcher.stopped) == ("ok ", True)
    assert matcher.add("more") == "" and matcher.flush() == ""


def test_empty_stop_is_refused() -> None:
    """case-15"""
    with pytest.raises(RequestError, match="stop string is empty"):
        StopMatcher(["a", ""])


def test_a_long_stop_string_stays_cheap() -> None:
    """A hostile stop of many equal letters must not make every letter expensive."""
    matcher = StopMatcher(["a" * 20_000 + "b"])
    with soon():  # comparing each letter with the whole stop anew: 10**9 steps
        shown = "".join(matcher.add("a" * 10) for _ in range(5000))
    assert len(shown) == 30_000
