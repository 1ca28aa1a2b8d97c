"""Scores of all experts, changed a layer at a time, and the least one that has a slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import Evictable

_ABSENT = np.inf


class Scoreboard:
    """Finding the least costs O(layers), plus O(experts of a layer) for each layer that changed since."""

    def __init__(self, space: ExpertSpace) -> None:
        layers = len(space.per_layer)
        self.scores: list[NDArray[np.float32]] = [np.zeros(count, np.float32) for count in space.per_layer]
        # Added to the scores: 0 for an expert with a slot, infinite for the others.
        self._barred = [np.full(count, _ABSENT, np.float32) for count in space.per_layer]
        self._least = np.full(layers, _ABSENT)  # of each layer, among those with a slot
        self._least_index = [0] * layers
        self._changed: set[int] = set()

    def score(self, layer: int, scores: NDArray[np.float32]) -> None:
        """New scores `[experts]` of a layer; all finite."""
        self.scores[layer] = scores
        self._changed.add(layer)

    def add(self, expert: ExpertId) -> None:
        """It has a slot."""
        layer, index = expert
        self._barred[layer][index] = 0.0
        self._changed.add(layer)

    def remove(self, expert: ExpertId) -> None:
        """It has none any more."""
        layer, index = expert
        self._barred[layer][index] = _ABSENT
        self._changed.add(layer)

    def first(self, evictable: Evictable) -> ExpertId | None:
        """The least that may go; ties go to the smaller ExpertId."""
        for layer in self._changed:
            self._find_least(layer, self.scores[layer] + self._barred[layer])
        self._changed.clear()
        hidden: dict[int, NDArray[np.float32]] = {}  # what this question may not choose, per layer
        while True:
            layer = int(self._least.argmin())
            if self._least[layer] == _ABSENT:
                found = None
                break
            found = ExpertId(layer, self._least_index[layer])
            if evictable(found):
                break
            ranked = hidden.setdefault(layer, self.scores[layer] + self._barred[layer])
            ranked[found.index] = _ABSENT
            self._find_least(layer, ranked)
        self._changed.update(hidden)
        return found

    def _find_least(self, layer: int, ranked: NDArray[np.float32]) -> None:
        index = int(ranked.argmin()) if ranked.size else 0
        self._least_index[layer] = index
        self._least[layer] = ranked[index] if ranked.size else _ABSENT
