"""How many experts each layer of a model has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from strata.core import ExpertId

MAX_LAYERS = 4096
MAX_EXPERTS = 65536
"""Per layer. Both bounds are ten times what any published model has; files that claim more are refused."""


@dataclass(frozen=True)
class ExpertSpace:
    """per_layer[i]: routed experts of decoder layer i, 0 for a dense layer. ValueError when out of bounds."""

    per_layer: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.per_layer) <= MAX_LAYERS:
            raise ValueError(f"{len(self.per_layer)} layers; a model has 1 to {MAX_LAYERS}")
        for layer, count in enumerate(self.per_layer):
            if not 0 <= count <= MAX_EXPERTS:
                raise ValueError(f"layer {layer} has {count} experts; a layer has 0 to {MAX_EXPERTS}")

    @cached_property
    def total(self) -> int:
        """Experts of the whole model."""
        return sum(self.per_layer)

    @cached_property
    def routed_layers(self) -> int:
        """Layers that have experts at all."""
        return sum(count > 0 for count in self.per_layer)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """offsets[i]: experts of all layers before layer i; one entry more than there are layers."""
        return (0, *itertools.accumulate(self.per_layer))

    def __contains__(self, expert: ExpertId) -> bool:
        layer, index = expert
        return 0 <= layer < len(self.per_layer) and 0 <= index < self.per_layer[layer]

    def __iter__(self) -> Iterator[ExpertId]:
        for layer, count in enumerate(self.per_layer):
            for index in range(count):
                yield ExpertId(layer, index)
