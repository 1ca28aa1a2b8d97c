"""A simulated step as spans: what each lane does in each layer, as the cost model adds it up."""

from __future__ import annotations

from dataclasses import dataclass

from strata.device.timeline import COMPUTE, D2H, DISK, H2D, HOST, Timeline, socket_lane
from strata.engine.simulate.experts import StepLayers
from strata.plan.cost import COPY_SECONDS, ROUND_TRIP_SECONDS, LayerCost, RoutedLayers, StepCost
from strata.plan.plan import Plan

MAX_LAYERS = 20_000
"""Layers that are drawn (some 400 steps of 48); later steps are drawn as a whole."""


@dataclass(frozen=True)
class _At:
    """Where a layer is drawn: when it begins, and its name."""

    begin: float
    name: str


class StepLanes:
    """Draws into a timeline. Decode steps have their layers, others are one span on the host's lane."""

    def __init__(self, timeline: Timeline, plan: Plan) -> None:
        self.timeline = timeline
        self._on_device = plan.device is not None
        self._sockets = [socket_lane(node.node) for node in plan.threads]
        self._drawn = 0

    def draw(self, begin: float, name: str, cost: StepCost, layers: StepLayers | None) -> None:
        """A step of `cost` that begins then."""
        busy = {lane: round(seconds * 1e3, 3) for lane, seconds in cost.busy.items() if seconds}
        self.timeline.add(HOST, name, begin, begin + cost.seconds, tokens=cost.tokens, busy_ms=busy)
        if layers is None or self._drawn + len(layers.routed) > MAX_LAYERS:
            return
        self._drawn += len(layers.routed)
        for index, routed in enumerate(layers.routed):
            self._layer(_At(begin, f"layer {index}"), layers.cost, routed)
            begin += layers.cost.seconds(routed.hits, routed.misses, routed.fetched)

    def _layer(self, at: _At, cost: LayerCost, routed: RoutedLayers) -> None:
        here = routed.misses - routed.fetched
        phase = at.begin + cost.base
        shared = [COMPUTE] if self._on_device else self._sockets
        for lane in shared:
            self._span(lane, f"{at.name} attention", at.begin, cost.base)
        self._span(COMPUTE, f"{at.name} experts", phase, (routed.hits + routed.fetched) * cost.on_device)
        there = cost.inputs + ROUND_TRIP_SECONDS / 2 if self._on_device and here else 0.0
        for lane in self._sockets:
            self._span(lane, f"{at.name} experts", phase + there, here * cost.on_host)
        self._span(DISK, f"{at.name} experts", phase, routed.misses * cost.on_disk)
        self._copies(at, cost, routed, phase)

    def _copies(self, at: _At, cost: LayerCost, routed: RoutedLayers, phase: float) -> None:
        """KV pages of the next layer cross while this one computes, and experts unless they are foreseen."""
        here = routed.misses - routed.fetched
        self._span(H2D, f"{at.name} KV", at.begin, cost.kv_in)
        self._span(D2H, f"{at.name} KV", at.begin, cost.kv_out)
        if routed.fetched:
            begin = max(at.begin + cost.kv_in, at.begin if cost.foreseen else phase)
            self._span(H2D, f"{at.name} experts", begin + COPY_SECONDS, routed.fetched * cost.on_bus)
        if here:
            self._span(D2H, f"{at.name} inputs", max(phase, at.begin + cost.kv_out), cost.inputs)

    def _span(self, lane: str, name: str, begin: float, seconds: float) -> None:
        if seconds > 0.0:
            self.timeline.add(lane, name, begin, begin + seconds)
