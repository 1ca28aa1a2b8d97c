"""Experts stream through buffers; in a prompt, the next layer's first ones before its router is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from strata.backends.hybrid.slots import SlotLoader
from strata.backends.hybrid.split import LayerMisses, Split
from strata.backends.hybrid.stream_buffers import StreamBuffers, StreamLoad
from strata.backends.parts import ExpertBank
from strata.core import ExpertId
from strata.memory.transfer import Priority
from strata.plan.cost import FORESEEN_SHARE
from strata.plan.routing import distinct_experts


class _Ahead(NamedTuple):
    """What was loaded for a layer before its router was asked."""

    layer: int
    loads: list[StreamLoad]


class ExpertStream:
    """Experts that get no slot. Decides whether a pass streams as a whole, and then keeps the bus busy across
    layers: each expert crosses at most once per layer and pass, and none takes a slot from what decode needs.
    The host may compute a share all the same.

    `use(load, wanted)` makes the launches for the experts of a load that are wanted, and releases it.
    """

    def __init__(self, buffers: StreamBuffers, loader: SlotLoader, split: Split) -> None:
        self.buffers = buffers
        self._loader = loader
        self._split = split
        self._banks: list[tuple[int, ExpertBank]] = []
        self._ahead = _Ahead(-1, [])
        self._least = 0
        self.base = 0.0

    @property
    def active(self) -> bool:
        """Whether the pass at hand streams."""
        return bool(self._banks)

    @property
    def all(self) -> bool:
        """Whether it streams all experts: nothing is left to the host."""
        return self.active and self._least >= self._banks[0][1].count

    def begin(self, banks: Sequence[tuple[int, ExpertBank]], rows: int, top_k: int, base: float) -> None:
        """A new pass over layers that route: (running count of the layer, its bank) of each, in order.

        base: seconds of a layer before its experts.
        """
        self.base = base
        self.buffers.reset()
        self._ahead = _Ahead(-1, [])
        self._least = self.sure_to_cross(banks[0][1], rows, top_k) if banks else 0
        self._banks = list(banks) if self._least else []
        self._look_ahead(0)

    def sure_to_cross(self, bank: ExpertBank, rows: int, top_k: int) -> int:
        """How many experts of a layer are worth loading before its router is asked: none unless nearly all of
        them will be needed, then as many as are better fetched than computed by the host."""
        if distinct_experts(rows, bank.count, top_k) < FORESEEN_SHARE * bank.count:
            return 0
        return self._split.count(LayerMisses(bank, rows, top_k, 0, range(bank.count), (), True, self.base))

    def loaded(self, layer: int) -> set[int]:
        """Experts of a layer that were loaded ahead: fetching them costs nothing any more."""
        loads = self._ahead.loads if self._ahead.layer == layer else []
        return {expert.index for load in loads for expert in load.experts}

    def run(
        self, layer: int, missed: Sequence[int], due: int, use: Callable[[StreamLoad, list[int]], None]
    ) -> None:
        """Compute a layer's missed experts (ascending) and, when the pass streams, begin to load the next
        layer's. due: the running count of the layer."""
        loads = self._ahead.loads if self._ahead.layer == layer else []
        wanted, there = set(missed), self.loaded(layer)
        parts = self._parts(layer, [index for index in missed if index not in there])
        while loads or parts:
            while parts and self.buffers.free:
                loads.append(self.buffers.load(parts.pop(0), Priority.NOW, due))
                self._loader.queue.pump()
            load = loads.pop(0)
            chosen = [expert.index for expert in load.experts if expert.index in wanted]
            if chosen:
                use(load, chosen)
            else:
                self.buffers.drop(load)
        self._look_ahead(1 + next((i for i, (_, b) in enumerate(self._banks) if b.layer == layer), 0))

    def _look_ahead(self, place: int) -> None:
        """Load the first experts of a layer that the cache has not, before anybody asks for them."""
        if place >= len(self._banks):
            return
        due, bank = self._banks[place]
        has = self._loader.has
        absent = [i for i in range(bank.count) if not has(ExpertId(bank.layer, i))]
        parts = self._parts(bank.layer, absent[: self._least])[: self.buffers.free]
        self._ahead = _Ahead(bank.layer, [])
        for part in parts:
            self._ahead.loads.append(self.buffers.load(part, Priority.NEXT, due))
            self._loader.queue.pump()  # a batch for each, so that the first is not held up by the last

    def _parts(self, layer: int, experts: Sequence[int]) -> list[list[ExpertId]]:
        size = self.buffers.experts
        ids = [ExpertId(layer, index) for index in experts]
        return [ids[i : i + size] for i in range(0, len(ids), size)]
