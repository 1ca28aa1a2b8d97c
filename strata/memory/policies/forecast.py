"""Evicts the expert that is expected to be used least in the time a slot lasts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import Evictable, Policy
from strata.memory.policies.forecast_model import Accesses, RoutingHistory, ValueWeights, accesses_of
from strata.memory.policies.scoreboard import Scoreboard

HORIZON = 1.5
"""How far the forecast looks, in turnovers of the cache: slots / experts that a token uses in all layers."""
SEED_STEPS = 64.0
"""What earlier runs count for: new traffic outweighs them after about as many steps."""
LEARN_PER_TOKEN = 8
"""Layers per token that the weights learn from, in turns: in deep models that is plenty."""
_MAX_PENDING = 256


class ForecastPolicy(Policy):
    """Ranks experts by the forecast of their discounted future uses; admits what ranks above its victim.

    The forecast is linear in frequencies of several half-lives and in what usually follows the experts just
    used, with weights learned while serving: recency where traffic repeats itself, frequency where it does
    not. Layers age by their own steps, so experts of different layers compare.

    Accesses are only noted and taken in when somebody asks: cheapest for a cache that asks once per step.
    """

    def __init__(self, space: ExpertSpace, slots: int) -> None:
        self._slots = slots
        self._layers = space.routed_layers
        self._history = RoutingHistory(space)
        self._layer_of = [layer for layer, count in enumerate(space.per_layer) if count]
        self._row_of = {layer: row for row, layer in enumerate(self._layer_of)}
        self._per_layer = space.per_layer
        self._weights = ValueWeights()
        self._board = Scoreboard(space)
        self._pending: dict[int, Sequence[int]] = {}  # by row
        self._routed = 0.0  # running mean of experts per access
        self._turn = 0

    def on_resize(self, slots: int) -> None:
        """Slots last longer in a larger cache: the forecast looks farther."""
        self._slots = slots

    def seed(self, layer: int, shares: NDArray[np.float64]) -> None:
        """The long-run frequency starts there."""
        self._history.seed(self._row_of[layer], shares.astype(np.float32), SEED_STEPS)
        self._board.score(layer, shares.astype(np.float32))

    def on_access(self, layer: int, experts: Sequence[int]) -> None:
        """Noted for the next question."""
        if not experts:
            return
        row = self._row_of[layer]
        if row in self._pending or len(self._pending) >= _MAX_PENDING:
            self._take_in()
        self._pending[row] = tuple(experts)

    def on_insert(self, expert: ExpertId) -> None:
        """Takes part in the ranking."""
        self._board.add(expert)

    def on_evict(self, expert: ExpertId) -> None:
        """Takes no part any more; what was learned about it stays."""
        self._board.remove(expert)

    def victim(self, evictable: Evictable) -> ExpertId | None:
        """The one with the least forecast that may go."""
        self._take_in()
        return self._board.first(evictable)

    def admits(self, candidate: ExpertId, victim: ExpertId) -> bool:
        """Whether more uses are expected of it than of its victim."""
        self._take_in()
        return self._score(candidate) > self._score(victim)

    def by_worth(self, experts: Sequence[ExpertId]) -> list[ExpertId]:
        """Most expected uses first."""
        self._take_in()
        return sorted(experts, key=lambda expert: (-self._score(expert), expert))

    def _score(self, expert: ExpertId) -> float:
        return float(self._board.scores[expert.layer][expert.index])

    def _take_in(self) -> None:
        """Learn from the pending accesses and score their layers anew."""
        if not self._pending:
            return
        accesses = accesses_of(list(self._pending.items()))
        self._pending.clear()
        history, sample = self._history, self._sample(len(accesses.rows))
        before = history.features(accesses.rows[sample])
        now = history.observe(accesses)
        after = history.features(accesses.rows[sample])
        uniform = history.uniform(accesses)
        self._weights.learn(before, after, now[sample], uniform[sample], self._discount(accesses))
        scores = history.forecast(accesses.rows, self._weights.weights)
        scores += uniform[:, None]
        for row, row_scores in zip(accesses.rows.tolist(), scores, strict=True):
            layer = self._layer_of[row]
            self._board.score(layer, row_scores[: self._per_layer[layer]])

    def _sample(self, count: int) -> slice:
        """Places of the accesses to learn from: every so many, starting at another one each time."""
        stride = -(-count // LEARN_PER_TOKEN)
        self._turn += 1
        return slice(self._turn % stride, None, stride)

    def _discount(self, accesses: Accesses) -> float:
        """Per step, such that the mean distance looked ahead is HORIZON turnovers of the cache."""
        mean = len(accesses.chosen) / len(accesses.rows)
        self._routed += (mean - self._routed) * (0.01 if self._routed else 1.0)
        ahead = HORIZON * self._slots / (self._routed * self._layers)
        return ahead / (1 + ahead)
