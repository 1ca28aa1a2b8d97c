"""A layer's launches up to its read-back of routes as a graph: captured once per shape of a batch, and
replayed by one call of the driver in later passes. It has run on the emulated device only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from strata.backends.hybrid.device_ops import DeviceOps
from strata.core import Batch
from strata.device.base import Graph, Launch
from strata.device.checks import differences

SHAPES = 8
"""Shapes of batches whose graphs are kept; those of the shape that was not used for the longest time go."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Segment:
    """graph: the launches of one layer. result: what they left where, in `taken` bytes of the workspace from
    `start` on."""

    graph: Graph
    result: Any
    start: int
    taken: int


class LayerGraphs:
    """Runs the launches that `build` makes, as a graph when they were made before for such a batch.

    Each pass makes the launches of its first segment in any case. If they are what was captured, argument by
    argument, those of the other layers are, too: all layers are told the same about a batch (its rows, the
    splits of its lengths, where its tables lie), and what else changes from pass to pass lies in memory. The
    emulated device compares every replay with what would have been launched.
    """

    def __init__(self, ops: DeviceOps) -> None:
        self.captured = 0
        self.replayed = 0
        self._ops = ops
        self._shapes: dict[tuple[int, ...], dict[int, _Segment]] = {}
        self._known: dict[int, _Segment] | None = None
        self._is_first = False

    def begin(self, batch: Batch | None) -> None:
        """A pass begins. None: without graphs."""
        self._known, self._is_first = None, True
        if batch is None:
            return
        shape = tuple(sequence.count for sequence in batch.sequences)
        self._known = self._shapes.pop(shape, {})
        self._shapes[shape] = self._known  # the latest is last
        if len(self._shapes) > SHAPES:
            self._forget(self._shapes.pop(next(iter(self._shapes))))

    def run(self, index: int, build: Callable[[], T]) -> T:
        """What `build` answers. It takes room from the workspace and calls the device by `launch` only, but
        for what happens once per pass, in the first segment, or once at all."""
        if self._known is None:
            return build()
        segment, workspace = self._known.get(index), self._ops.memory.workspace
        is_new = False
        if self._is_first or segment is None or segment.start != workspace.used:
            known, segment = segment, self._made(index, segment, build)
            is_new = segment is not known
        self._is_first = False
        if not is_new:
            self.replayed += 1
            self._ops.replay(segment.graph, lambda: self._again(build))
        if segment.taken:
            workspace.take(segment.taken, "results of a graph")
        result: T = segment.result
        return result

    def _made(self, index: int, segment: _Segment | None, build: Callable[[], Any]) -> _Segment:
        """The segment, launched and captured anew unless its launches are what they were.

        Launched first: the driver may load a kernel when it is first launched, which no capture should see.
        """
        assert self._known is not None, "called within a pass that has graphs"
        workspace = self._ops.memory.workspace
        start = workspace.used
        with workspace.scope(), self._ops.recorded() as launches:
            result = build()
            taken = workspace.used - start
        if segment is not None and not differences(segment.graph.launches, launches):
            return segment
        self._forget(self._known if self._is_first else {index: self._known.get(index)})
        self._ops.launch(launches)
        graph = self._ops.device.capture(launches, self._ops.memory.compute)
        made = self._known[index] = _Segment(graph, result, start, taken)
        self.captured += 1
        return made

    def _again(self, build: Callable[[], Any]) -> list[Launch]:
        """The launches that a graph stands for, as this pass would make them."""
        with self._ops.memory.workspace.scope(), self._ops.recorded() as launches:
            build()
        return launches

    def _forget(self, segments: dict[int, _Segment | None] | dict[int, _Segment]) -> None:
        for segment in segments.values():
            if segment is not None:
                self._ops.device.free_graph(segment.graph)
        segments.clear()
