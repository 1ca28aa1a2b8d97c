"""Made-up routes against the published figures they were fitted to, and recorded ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from strata.engine.simulate.routes import HabitRoutes, Row, TraceRoutes, habits
from strata.errors import UsageError
from strata.memory.experts import ExpertSpace
from strata.memory.trace_format import Access, TraceHeader
from strata.plan.routing import published_curve


class Trace:
    """A trace in memory."""

    def __init__(self, layers: Sequence[int], accesses: Sequence[Access]) -> None:
        self.header = TraceHeader("toy", ExpertSpace(tuple(layers)))
        self.accesses = accesses

    def __iter__(self) -> Iterator[Access]:
        return iter(self.accesses)


def lru_hits(rows: Sequence[Row], slots: Sequence[int]) -> list[float]:
    """Share of accesses that LRU with so many slots per layer hits, by stack distance."""
    hits, total = [0] * len(slots), 0
    for layer in range(len(rows[0])):
        stack: list[int] = []
        for row in rows:
            chosen = list(row[layer])
            for expert in chosen:
                depth = stack.index(expert) if expert in stack else len(stack) + max(slots)
                hits = [count + (depth < room) for count, room in zip(hits, slots, strict=True)]
            total += len(chosen)
            stack = chosen + [expert for expert in stack if expert not in chosen]
    return [count / total for count in hits]


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 1200), (64, 8, 500), (128, 8, 500)])
def test_made_up_routes_hit_as_often_as_the_published_ones(experts: int, top_k: int, tokens: int) -> None:
    """With LRU, for every number of slots that was published: within four points."""
    stream = HabitRoutes(habits(experts), layers=2, experts=experts, top_k=top_k, seed=3).stream(0)
    rows = [stream.peek(ahead) for ahead in range(tokens)]
    curve = published_curve(experts)
    slots = [round(share * experts) for share, _ in curve.points]
    for found, (_, published) in zip(lru_hits(rows, slots), curve.points, strict=True):
        assert found == pytest.approx(published, abs=0.04)


def test_a_stream_is_the_same_each_time_and_requests_differ() -> None:
    routes = HabitRoutes(habits(64), 3, 64, 8, seed=1)
    first, again, other = (routes.stream(number) for number in (0, 0, 1))
    for _ in range(3):
        rows = [stream.peek(0) for stream in (first, again, other)]
        assert rows[0] == rows[1] != rows[2]
        assert all(len(set(layer)) == 8 and max(layer) < 64 for layer in rows[0])
        for stream in (first, again, other):
            stream.advance(1)


def test_looking_ahead_changes_nothing() -> None:
    routes = HabitRoutes(habits(8), 1, 8, 2)
    plain, peeking = routes.stream(0), routes.stream(0)
    expected = [plain.peek(ahead) for ahead in range(6)]
    assert peeking.peek(3) == expected[3]
    peeking.advance(2)
    assert [peeking.peek(ahead) for ahead in range(4)] == expected[2:]


def test_a_trace_gives_each_request_its_tokens_in_order() -> None:
    """Dense layers, prompts, steps of several requests and steps that are cut off are left out."""
    accesses = [
        Access(1, 0, 1, (0, 1), tokens=4, prefill=True),
        *(Access(1, step, layer, (step, step + 1)) for step in (1, 2) for layer in (1, 2)),
        Access(0, 0, 1, (5, 6), tokens=2),
        *(Access(2, 1, layer, (7, layer)) for layer in (1, 2)),
        Access(2, 2, 1, (0, 1)),
    ]
    routes = TraceRoutes(Trace((0, 8, 8), accesses), layers=2, experts=8, top_k=2)
    found = [[tuple(layer) for layer in routes.stream(0).peek(ahead)] for ahead in range(5)]
    first, second = [[(1, 2)] * 2, [(2, 3)] * 2], [[(7, 1), (7, 2)]]
    assert found == [*first, *second, *first]
    assert [tuple(layer) for layer in routes.stream(3).peek(0)] == second[0]
    assert routes.source == "trace of toy, 3 tokens (steps of several tokens, left out: 1)"


def test_the_trace_of_another_model_is_refused() -> None:
    trace = Trace((8, 8), [Access(1, 0, 0, (0, 1))])
    with pytest.raises(UsageError, match="2 layers of 8 experts, the model 3 of 8"):
        TraceRoutes(trace, layers=3, experts=8, top_k=2)
    with pytest.raises(UsageError, match="no step that decoded a single token"):
        TraceRoutes(trace, layers=2, experts=8, top_k=2)
    assert list(itertools.islice(trace, 1))
    narrow = Trace((8,), [Access(1, 1, 0, (0, 1))])
    with pytest.raises(UsageError, match="2 experts per token and layer, the model 4"):
        TraceRoutes(narrow, layers=1, experts=8, top_k=4)
