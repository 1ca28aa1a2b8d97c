"""Where a simulated router's choices come from: a recorded trace, or a routing model that says what it is.

A stream is the choices of one request, token after token; a row is one token's: experts of each layer that
routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strata.errors import UsageError
from strata.memory.trace import TraceSource

Row = Sequence[Sequence[int]]


class Routes(Protocol):
    """Gives every request its stream."""

    @property
    def source(self) -> str:
        """Where the choices come from, for people."""
        ...

    def stream(self, number: int) -> Stream:
        """The stream of the request of that number; the same each time."""
        ...


class Stream:
    """One request's rows. `peek` looks ahead, for tokens that are proposed before they are certain."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._seen: deque[Row] = deque()

    def peek(self, ahead: int) -> Row:
        """The row after `ahead` others."""
        while len(self._seen) <= ahead:
            self._seen.append(next(self._rows))
        return self._seen[ahead]

    def advance(self, count: int) -> None:
        """So many tokens are behind."""
        for _ in range(count):
            self.peek(0)
            self._seen.popleft()


@dataclass(frozen=True)
class Habits:
    """How a router chooses: of all experts those with the highest scores.

    score = -popularity * log(rank) + mood + Gumbel noise. Ranks are a layer's own and the same for all
    requests. A mood is a request's own: normal, `spread` wide, and wanders from token to token with
    correlation `persistence`. What a fit to published hit rates cannot tell is what several requests have in
    common.
    """

    popularity: float
    spread: float
    persistence: float
    source: str


UNIFORM = Habits(0.0, 0.0, 0.0, "uniform routing: no locality at all")
# Fitted to the curves of plan/routing.py: LRU with slots of one layer, one request, by the largest error
# (tests/engine/test_simulated_routes.py has the check).
_FITTED: tuple[tuple[int, Habits], ...] = (
    (97, Habits(1.25, 1.91, 0.981, "fitted to published traces of Qwen3-30B-A3B (128 experts, top 8)")),
    (33, Habits(0.226, 0.625, 0.975, "fitted to a public trace of OLMoE (64 experts, top 8)")),
    (0, Habits(1.08, 2.42, 0.208, "fitted to a public trace of Mixtral 8x7B (8 experts, top 2)")),
)


def habits(experts: int) -> Habits:
    """Those fitted to the published model whose number of experts is nearest."""
    return next(found for least, found in _FITTED if experts >= least)


class HabitRoutes:
    """Routes of a routing model."""

    def __init__(self, habits: Habits, layers: int, experts: int, top_k: int, seed: int = 0) -> None:
        self.habits, self.top_k, self.seed = habits, top_k, seed
        chooser = np.random.default_rng(seed)
        ranks = (
            np.stack([chooser.permutation(experts) for _ in range(layers)]) if layers else np.zeros((0, 1))
        )
        self._liked = -habits.popularity * np.log1p(ranks)

    @property
    def source(self) -> str:
        """The routing model's."""
        return self.habits.source

    def stream(self, number: int) -> Stream:
        """Endless, made as it is asked for."""
        return Stream(self._rows(np.random.default_rng((self.seed, number + 1))))

    def _rows(self, chooser: np.random.Generator) -> Iterator[Row]:
        shape, habits = self._liked.shape, self.habits
        keep, renew = habits.persistence, np.sqrt(1 - habits.persistence**2)
        mood = chooser.standard_normal(shape)
        while True:
            mood = keep * mood + renew * chooser.standard_normal(shape)
            scores = self._liked + habits.spread * mood + chooser.gumbel(size=shape)
            yield np.argpartition(-scores, self.top_k - 1, axis=1)[:, : self.top_k].tolist()


class TraceRoutes:
    """Routes of a trace: decoding of single requests. Streams go on with the next request where one ends."""

    def __init__(self, trace: TraceSource, layers: int, experts: int, top_k: int) -> None:
        """Raises UsageError for the trace of another model, or one without single requests."""
        per_layer = [count for count in trace.header.space.per_layer if count]
        if per_layer != [experts] * layers:
            counts = " and ".join(sorted({str(count) for count in per_layer}))
            raise UsageError(
                f"the trace has {len(per_layer)} layers of {counts} experts, the model {layers} of {experts}",
                remedy="record one with this model: strata run MODEL --record-trace FILE",
            )
        self._places = {layer: place for place, layer in enumerate(_routed(trace))}
        self._left_out: set[tuple[int, int]] = set()
        self._requests = list(self._read(trace))
        if not self._requests:
            raise UsageError(
                "the trace has no step that decoded a single token",
                remedy="record one request, with --set speculative.use=off",
            )
        chosen = {len(layer) for rows in self._requests for row in rows for layer in row}
        if chosen != {top_k}:
            counts = " and ".join(map(str, sorted(chosen)))
            raise UsageError(
                f"the trace has {counts} experts per token and layer, the model {top_k}",
                remedy="record one with this model: strata run MODEL --record-trace FILE",
            )
        self.source = f"trace of {trace.header.model}, {sum(map(len, self._requests))} tokens"
        if self._left_out:
            self.source += f" (steps of several tokens, left out: {len(self._left_out)})"

    def stream(self, number: int) -> Stream:
        """From the beginning of one of its requests, and round and round."""
        return Stream(self._rows(number))

    def _rows(self, number: int) -> Iterator[Row]:
        while True:
            yield from self._requests[number % len(self._requests)]
            number += 1

    def _read(self, trace: TraceSource) -> Iterator[Sequence[Row]]:
        steps: dict[int, dict[int, dict[int, tuple[int, ...]]]] = {}
        for access in trace:
            if access.prefill:
                continue
            if access.tokens > 1:  # what each token chose is not told, only what they chose together
                self._left_out.add((access.sequence, access.step))
            else:
                step = steps.setdefault(access.sequence, {}).setdefault(access.step, {})
                step[self._places[access.layer]] = access.experts
        for rows in steps.values():
            whole = [
                [row[place] for place in sorted(row)]
                for row in rows.values()
                if len(row) == len(self._places)
            ]
            if whole:
                yield whole


def _routed(trace: TraceSource) -> list[int]:
    return [layer for layer, count in enumerate(trace.header.space.per_layer) if count]
