"""Copies of experts on every node: for those that are not cut into slices, where memory allows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from strata.core import ExpertId
from strata.memory.host_arena import System
from strata.memory.node_arenas import Bytes, NodeArenas, Pieces
from strata.store.formats import ExpertLayout


class NodeCopies(NodeArenas):
    """One arena on each node with all experts or the hottest; a record is copied when it is first asked for.

    Slices on their own nodes (`NodeExperts`) read as fast and take the memory once: this is for stores that
    are not cut for it.
    """

    def __init__(
        self,
        layouts: Mapping[int, ExpertLayout],
        experts: int,
        nodes: Sequence[int],
        record: Callable[[ExpertId], Bytes],
        *,
        free: Mapping[int, int] | None = None,
        system: System | None = None,
        hot: Collection[ExpertId] | None = None,
    ) -> None:
        """As for NodeExperts. hot: those that are copied, None = all; the others stay where they are."""
        self._sizes = {layer: layout.record_bytes for layer, layout in layouts.items()}
        self._record = record
        every = (ExpertId(layer, index) for layer in layouts for index in range(experts))
        self._starts: dict[ExpertId, int] = {}
        size = 0
        for expert in every if hot is None else sorted(hot):
            self._starts[expert] = size
            size += self._sizes[expert.layer]
        super().__init__(nodes, [size] * len(nodes), free, system)

    def pieces(self, expert: ExpertId) -> Pieces | Bytes:
        """The record on every node, u8 [record_bytes] each; read-only, and they stay. One that is not copied:
        the record."""
        if expert not in self._starts:
            return self._record(expert)
        return self._kept(expert)

    @property
    def copies(self) -> int:
        """Of each expert."""
        return len(self.nodes)

    def _place(self, expert: ExpertId) -> Pieces:
        record, nbytes = self._record(expert), self._sizes[expert.layer]
        start = self._starts[expert]
        rooms = tuple(arena.memory[start : start + nbytes] for arena in self.arenas)
        for room in rooms:
            room[:] = record
            room.flags.writeable = False
        return rooms
