"""Expert slices in memory of the nodes whose threads compute them.

Why copies, and not the mapped files: the kernel places a page of a file by the policy of the thread that
reads it in, ignores mbind for such mappings, reads ahead in pieces that cut through slices, and keeps a file
that an earlier process read where it lies. An arena that is bound to its node holds what it was given. The
files' own pages are clean and the first that the kernel drops when memory gets short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from strata.core import ExpertId
from strata.memory.host_arena import System
from strata.memory.node_arenas import Bytes, NodeArenas, Pieces
from strata.store.formats import ExpertLayout, padded

_ALIGN = 64


def node_bytes(layouts: Mapping[int, ExpertLayout], experts: int, nodes: int) -> tuple[int, ...]:
    """Bytes that each of `nodes` nodes holds of `experts` experts in layers of these layouts.

    What follows the slices in a record (biases) lies on the first node.
    """
    slices = sum(layout.slices // nodes * layout.slice_bytes for layout in layouts.values()) * experts
    tails = sum(_tail(layout) for layout in layouts.values()) * experts
    return (slices + tails, *[slices] * (nodes - 1))


def _tail(layout: ExpertLayout) -> int:
    rest = layout.record_bytes - layout.slices * layout.slice_bytes
    return padded(rest, _ALIGN)


class NodeExperts(NodeArenas):
    """One arena on each node, each with its slices of every expert; a record is copied when first asked for.

    Slice i of an expert with s slices lies on node `nodes[i * len(nodes) // s]`: the order in which the CPU
    backend deals slices to the threads of the nodes.
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
    ) -> None:
        """layouts: by layer. record: an expert's bytes, u8 [record_bytes]. free: bytes left on each node.

        CapacityError when a node has not enough, before anything is taken.
        """
        super().__init__(nodes, node_bytes(layouts, experts, len(nodes)), free, system)
        self._layouts = dict(layouts)
        self._experts = experts
        self._record = record
        self._starts = self._lay_out()

    def _lay_out(self) -> dict[int, tuple[int, ...]]:
        """Where each layer begins in every arena."""
        starts, at = {}, [0] * len(self.nodes)
        for layer, layout in self._layouts.items():
            starts[layer] = tuple(at)
            at = [
                a + size
                for a, size in zip(at, node_bytes({layer: layout}, self._experts, len(at)), strict=True)
            ]
        return starts

    def pieces(self, expert: ExpertId) -> Pieces:
        """Every slice, u8 [slice_bytes], and what follows them in the record; read-only, and they stay."""
        return self._kept(expert)

    @property
    def copies(self) -> int:
        """Of each expert."""
        return 1

    def _place(self, expert: ExpertId) -> Pieces:
        layout, record = self._layouts[expert.layer], self._record(expert)
        size, per_node = layout.slice_bytes, layout.slices // len(self.nodes)
        rooms = [self._room(expert, node) for node in range(len(self.nodes))]
        parts = [rooms[i // per_node][i % per_node * size :][:size] for i in range(layout.slices)]
        rest = layout.record_bytes - layout.slices * size
        parts.append(rooms[0][per_node * size :][:rest])
        at = 0
        for part in parts:
            part[:] = record[at : at + part.nbytes]
            part.flags.writeable = False
            at += part.nbytes
        return tuple(parts)

    def _room(self, expert: ExpertId, node: int) -> Bytes:
        """The expert's room in the arena of the node."""
        layout = self._layouts[expert.layer]
        size = node_bytes({0: layout}, 1, len(self.nodes))[node]
        start = self._starts[expert.layer][node] + expert.index * size
        return self.arenas[node].memory[start : start + size]
