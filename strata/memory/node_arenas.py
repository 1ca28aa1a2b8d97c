"""One arena on each memory node, filled expert by expert when it is first asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import CapacityError
from strata.hardware.page_check import PlacedRange
from strata.memory.host_arena import HostArena, System, host_arena

Bytes = NDArray[np.uint8]
Pieces = tuple[Bytes, ...]


class NodeArenas(ABC):
    """What lies where, and what was asked for so far. Subclasses say where an expert's bytes go."""

    def __init__(
        self,
        nodes: Sequence[int],
        sizes: Sequence[int],
        free: Mapping[int, int] | None = None,
        system: System | None = None,
    ) -> None:
        """sizes: bytes of each node's arena. free: bytes left on each node, as far as known.

        CapacityError when a node has not enough, before anything is taken.
        """
        self.nodes = tuple(nodes)
        _check_room(self.nodes, sizes, free or {})
        self.arenas: tuple[HostArena, ...] = tuple(
            host_arena(size, [node], system, strict=True) for node, size in zip(nodes, sizes, strict=True)
        )
        self._placed: dict[ExpertId, Pieces] = {}

    @property
    def placed(self) -> int:
        """Experts that were asked for so far."""
        return len(self._placed)

    def ranges(self) -> list[PlacedRange]:
        """What should lie where, for who checks it."""
        return [
            PlacedRange(f"experts of node {node}", arena.memory.ctypes.data, arena.memory.nbytes, (node,))
            for node, arena in zip(self.nodes, self.arenas, strict=True)
            if arena.memory.nbytes
        ]

    def _kept(self, expert: ExpertId) -> Pieces:
        """Its pieces, which are filled the first time; read-only, and they stay."""
        found = self._placed.get(expert)
        if found is None:
            found = self._placed[expert] = self._place(expert)
        return found

    @abstractmethod
    def _place(self, expert: ExpertId) -> Pieces:
        """Fill an expert's room."""


def _check_room(nodes: Sequence[int], sizes: Sequence[int], free: Mapping[int, int]) -> None:
    for node, size in zip(nodes, sizes, strict=True):
        if size > free.get(node, size):
            raise CapacityError(
                f"the experts take {size} bytes on memory node {node}, {free[node]} are free",
                remedy="free memory on that node, or choose host.numa interleave",
            )
