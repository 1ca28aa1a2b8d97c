"""Texts in turns: fair orders, slices that end at the same token, and what a decoding counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from engines import GREEDY, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from ticking_clock import TickingClock

from strata.core import Request
from strata.engine.bench.disturbances import DISTURBED, undisturbed
from strata.engine.bench.turns import SLICE, Decoding, Step, Turns, orders
from strata.engine.engine import Engine


@pytest.mark.parametrize("count", range(1, 9))
def test_everybody_follows_everybody_else_equally_often(count: int) -> None:
    """And is everywhere equally often; from 4 on, nobody is the last of one and the first of the next."""
    found = list(orders(count))
    assert all(sorted(order) == list(range(count)) for order in found)
    assert len(set(Counter(enumerate_all(found)).values())) == 1
    follows = Counter(pair for order in found for pair in pairwise(order))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1
    seams = zip(found, [*found[1:], found[0]], strict=True)
    assert count < 4 or all(last[-1] != first[0] for last, first in seams)


def enumerate_all(found: list[list[int]]) -> list[tuple[int, int]]:
    return [pair for order in found for pair in enumerate(order)]


@dataclass
class Paced:
    """Instead of a Decoding: steps of so many tokens and seconds, each written into a common log."""

    log: list[tuple[Any, int]]
    width: int
    step: float
    end: int
    tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    request: Any = field(default_factory=lambda: SimpleNamespace(finish_reason=None))

    def advance(self, until: int) -> None:
        while self.tokens < min(until, self.end):
            self.tokens = min(self.end, self.tokens + self.width)
            self.steps.append(Step(self.step, self.width))
        if self.tokens == self.end:
            self.request.finish_reason = "length"
        self.log.append((self, until))


@given(
    st.lists(st.integers(1, 17), min_size=1, max_size=6),
    st.floats(1e-4, 0.05),
    st.integers(1, 300),
)
def test_slices_end_at_the_same_token(widths: list[int], step: float, end: int) -> None:
    """For all; they grow by what plain decoding does in SLICE, by a token at least, till all have ended."""
    log: list[tuple[Paced, int]] = []
    texts: list[Any] = [Paced(log, width, step, end) for width in [1, *widths]]
    Turns(len(texts)).take(texts, texts[0])
    assert {text.tokens for text in texts} == {end}
    ends = [until for _, until in log]
    assert ends == sorted(ends) and set(Counter(ends).values()) == {len(texts)}
    steps = sorted(set(ends))
    assert steps[0] == 1 and steps[-1] >= end and all(each < end for each in steps[:-1])
    for before, after in pairwise(steps):
        tokens = after - before
        assert tokens == 1 or (tokens - 1) * step < SLICE * 1.001
        assert tokens * step >= SLICE * 0.999


def test_the_pace_is_known_in_the_next_round() -> None:
    log: list[tuple[Paced, int]] = []
    turns = Turns(1)
    for _ in range(2):
        text: Any = Paced(log, 1, SLICE / 7.5, 20)
        turns.take([text], text)
    assert [until for _, until in log] == [1, 9, 17, 25, 8, 16, 24]


def test_a_decoding_counts_what_follows_the_first_token(engine: Engine) -> None:
    """Seconds and tokens of every step; it goes on from where it stopped."""
    decoding = Decoding(engine, Request("a", prompt_of(20), GREEDY), None, TickingClock())
    assert decoding.tokens == 0 and len(decoding.request.generated) == 1
    decoding.advance(4)
    assert decoding.tokens == 4 and decoding.request.finish_reason is None
    decoding.advance(3)
    assert decoding.tokens == 4
    decoding.advance()
    assert decoding.steps == [Step(1.0, 1)] * 9 and decoding.request.finish_reason


def test_what_went_wrong_is_raised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures of half a text."""
    decoding = Decoding(engine, Request("a", prompt_of(5), GREEDY))

    def broken(works: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.executor, "run", broken)
    with pytest.raises(ZeroDivisionError):
        decoding.advance()
    with pytest.raises(ZeroDivisionError):
        Decoding(engine, Request("b", prompt_of(5), GREEDY))


def steps_of(*seconds: float, rows: int = 1, drafting: float = 0.0) -> list[Step]:
    return [Step(each, rows, rows, drafting) for each in seconds]


def test_what_disturbs_a_step_is_cut() -> None:
    """To what steps of as many rows take in all texts and rounds, in plain steps of the round."""
    plain, drafted = steps_of(1.0, 1.0, 1.0, 40.0), steps_of(3.0, 3.0, 3.0, 40.0, rows=9)
    slow = steps_of(2.0, 2.0, 2.0), steps_of(6.0, 40.0, rows=9)
    found = undisturbed([(plain, drafted), slow])
    assert found[0] == [[1.0, 1.0, 1.0, DISTURBED], [3.0, 3.0, 3.0, 3 * DISTURBED]]
    assert found[1] == [[2.0, 2.0, 2.0], [6.0, 6 * DISTURBED]]


def test_fewer_rows_never_take_more_and_drafting_counts_in_full() -> None:
    """A single step of its kind has those of more rows for a measure, and none if it has the most rows."""
    plain, drafted = steps_of(1.0, 1.0, 1.0), steps_of(3.0, 3.0, rows=9)
    single, reading, longest = steps_of(40.0, rows=5), steps_of(90.0, drafting=89.0), steps_of(50.0, rows=17)
    found = undisturbed([(plain, [*drafted, *single, *reading, *longest])])
    assert found == [[[1.0] * 3, [3.0, 3.0, 3 * DISTURBED, 90.0, 50.0]]]
