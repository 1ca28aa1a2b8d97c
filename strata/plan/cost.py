"""The one cost model: seconds of a step from bytes, multiply-adds and the speeds of a machine.

Planner, split decision and simulator all call this. Everything is a pure function of frozen values.

**Lanes** work at the same time: the device, the bus in both directions, the host's processors with their
memory, the disk. What a lane does in a step takes bytes / speed or multiply-adds / speed, whichever is more.

**Overlap.** Layers follow each other. In a layer the device does attention and what all tokens share
(`base`), then the experts: hits on the device, misses on the host or fetched over the bus, all at the same
time; the layer ends with the last of them. Fetches that are foreseen (a chunk so large that nearly all
experts are needed) and KV pages that live in host memory cross while earlier layers compute, so the bus only
limits a layer when it is busy for longer than the rest takes. Without a device the host does one after the
other.

**Handshakes**: kernel launches, the router's result on its way to the host and the host's share back, copies
until they start. They are constants below; of "assumed" ones nothing was measured, no GPU has run this yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strata.plan.footprint import Footprint
from strata.plan.routing import HitCurve, batch_hits, distinct_experts
from strata.plan.speeds import Speeds

Lane = Literal["device", "to_device", "to_host", "host", "disk", "handshakes"]
Misses = Literal["auto", "cpu", "fetch"]

HOST_LAYER_SECONDS = 100e-6
"""A layer's op calls from Python; `strata bench demo`: 1,070 tokens/s, 6 tiny layers, 2 cores."""
LAUNCH_SECONDS = 4e-6
"""One kernel, launch to launch in a stream; assumed."""
MOE_LAYER_KERNELS, DENSE_LAYER_KERNELS = 8, 6
"""Launches of a layer that decodes with all its experts on the device, as `strata bench MODEL --dry-launch`
counts them without CUDA graphs; one of the 8 guesses what the next layer's router will say."""
ROUND_TRIP_SECONDS = 30e-6
"""Router's result to the host and the host's share back, both events and small copies; assumed."""
COPY_SECONDS = 10e-6
"""A batch of copies until the first byte moves; assumed."""
DISK_SECONDS = 100e-6
"""A batch of direct reads until the first byte comes; NVMe datasheets, 4 KiB random reads."""
FORESEEN_SHARE = 0.9
"""When a chunk needs this share of a layer's experts, all are streamed ahead of the router; assumed."""
ACTIVATION_BYTES = 4
"""f32 activations cross the bus for the host's share."""


@dataclass(frozen=True)
class Placement:
    """Where a model's parts live while it runs.

    on_device: static weights, head and attention; False: the host does everything. slots: experts on the
    device. kv_on_device: else pages are in host memory and cross for every step. in_memory: experts that host
    memory holds; the rest is read from disk when routed to.
    """

    on_device: bool
    slots: int
    kv_on_device: bool
    in_memory: int
    misses: Misses = "auto"


@dataclass(frozen=True)
class Step:
    """One forward pass: `tokens` tokens of `sequences` requests, each with `depth` tokens before them.

    logits: rows whose logits are wanted (one per sequence while decoding).
    """

    tokens: int
    sequences: int
    depth: int
    logits: int

    @classmethod
    def decode(cls, sequences: int, depth: int) -> Step:
        """One token of each of `sequences` requests."""
        return cls(sequences, sequences, depth, sequences)

    @classmethod
    def prefill(cls, chunk: int, depth: int) -> Step:
        """A chunk of one prompt."""
        return cls(chunk, 1, depth, 0)


@dataclass(frozen=True)
class StepCost:
    """seconds: of the whole step; busy: how long each lane works in it (lanes overlap: the sum is larger).

    distinct, misses, fetched: experts per layer that routes, expected. tokens: of the step.
    """

    seconds: float
    busy: Mapping[Lane, float]
    distinct: float
    misses: float
    fetched: float
    tokens: int

    @property
    def bottleneck(self) -> Lane:
        """The lane that works longest: making another one faster gains nothing."""
        return max(self.busy, key=lambda lane: self.busy[lane])

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer that routes, and of one expert in it. The engine fills one in from measured times.

    base: before the experts; kv_in, kv_out: of the bus, for KV pages in host memory.
    on_*: seconds of one expert in a lane (on_disk: on average of those that are missed). inputs, outputs: the
    host's share on its way there and back. foreseen: fetches need not wait for the router.
    """

    base: float
    kv_in: float
    kv_out: float
    on_device: float
    on_host: float
    on_bus: float
    on_disk: float
    inputs: float = 0.0
    outputs: float = 0.0
    foreseen: bool = False

    def seconds(self, hits: float, misses: float, fetched: float) -> float:
        """Of a layer in which `fetched` of the misses are fetched and the host computes the others."""
        here = misses - fetched
        inputs, outputs, wait = (self.inputs, self.outputs, ROUND_TRIP_SECONDS) if here else (0.0,) * 3
        host = here * self.on_host + (inputs + outputs + wait if self.on_bus else 0.0)
        disk = misses * self.on_disk + (DISK_SECONDS if misses and self.on_disk else 0.0)
        bus = fetched * self.on_bus + (COPY_SECONDS if fetched else 0.0)
        phase = max((hits + fetched) * self.on_device, host, disk, 0.0 if self.foreseen else bus)
        return max(self.base + phase, self.kv_in + bus + outputs, self.kv_out + inputs)

    def split(self, hits: float, misses: int, mode: Misses) -> int:
        """How many of `misses` to fetch so that the layer ends first; the rest is the host's."""
        if mode == "cpu" or self.on_bus == 0.0:
            return 0
        if mode == "fetch":
            return misses
        return min(range(misses + 1), key=lambda fetched: (self.seconds(hits, misses, fetched), fetched))


def step_cost(
    model: Footprint, speeds: Speeds, placement: Placement, step: Step, curve: HitCurve
) -> StepCost:
    """Seconds of a step and what each lane does in it.

    The experts it touches are those that `usage` expects.
    """
    return expected_cost(model, speeds, placement, step, usage(model, placement, step, curve))


def expected_cost(model: Footprint, speeds: Speeds, placement: Placement, step: Step, use: Usage) -> StepCost:
    """The same for experts that are told.

    Misses per layer are a whole number in reality, so the cost of the expected number is interpolated between
    the whole numbers beside it.
    """
    layer = layer_cost(model, speeds, placement, step, use)
    layers = []
    for misses, weight in _neighbours(use.misses):
        hits = max(0.0, use.distinct - misses)
        chosen = layer.split(hits, misses, placement.misses)
        layers.append(RoutedLayers(model.moe_layers * weight, hits, misses, chosen))
    return sum_up(model, speeds, placement, step, layer, layers)


@dataclass(frozen=True)
class RoutedLayers:
    """`count` layers alike (expected, so not always whole): experts of each that hit, miss, are fetched."""

    count: float
    hits: float
    misses: int
    fetched: int


def sum_up(
    model: Footprint,
    speeds: Speeds,
    placement: Placement,
    step: Step,
    layer: LayerCost,
    routed: Sequence[RoutedLayers],
) -> StepCost:
    """A step from what happened in each of its layers that route; the others and the head are added."""
    dense = model.layers - model.moe_layers
    seconds = dense * layer.seconds(0.0, 0, 0) + _head_seconds(model, speeds, placement, step)
    seconds += math.fsum(e.count * layer.seconds(e.hits, e.misses, e.fetched) for e in routed)
    layers = max(1, model.moe_layers)
    misses = math.fsum(e.count * e.misses for e in routed) / layers
    distinct = math.fsum(e.count * (e.hits + e.misses) for e in routed) / layers
    fetched = math.fsum(e.count * e.fetched for e in routed) / layers
    busy = _busy(model, speeds, placement, step, layer, Usage(distinct, misses, 0.0), fetched)
    return StepCost(seconds, busy, distinct, misses, fetched, step.tokens)


def _neighbours(value: float) -> list[tuple[int, float]]:
    """The whole numbers around a value with their weights."""
    low = math.floor(value)
    part = value - low
    return [(low, 1 - part), (low + 1, part)] if part else [(low, 1.0)]


@dataclass(frozen=True)
class Usage:
    """Experts of one layer in one step, expected: touched, not on the device, not in memory either."""

    distinct: float
    misses: float
    from_disk: float


def usage(model: Footprint, placement: Placement, step: Step, curve: HitCurve) -> Usage:
    """Experts that a step touches in a layer, and how many of them are where."""
    if not model.moe_layers:
        return Usage(0.0, 0.0, 0.0)
    distinct = distinct_experts(step.tokens, model.experts, model.top_k)
    slots = placement.slots / model.moe_layers
    held = max(slots, placement.in_memory / model.moe_layers)  # memory keeps what the device has, too
    missed = [
        distinct - min(room, distinct * batch_hits(curve, room, model.experts, model.top_k, step.tokens))
        for room in (slots, held)
    ]
    return Usage(distinct, missed[0], min(missed))


def layer_cost(model: Footprint, speeds: Speeds, placement: Placement, step: Step, use: Usage) -> LayerCost:
    """What one layer and one expert in it take; `use`: what the step needs of it."""
    base = base_seconds(model, speeds, placement, step) / model.layers
    used = max(use.distinct, 1e-9)
    macs = model.expert_macs * step.tokens * model.top_k / used
    size = model.expert_bytes
    on_host = max(size / speeds.host_read, macs / speeds.host_macs)
    on_disk = size / speeds.disk_read * use.from_disk / max(use.misses, 1e-9)
    if not placement.on_device:
        return LayerCost(base, 0.0, 0.0, 0.0, on_host, 0.0, on_disk)
    rows = step.tokens * min(1.0, model.top_k * use.misses / used)
    cross = rows * model.hidden * ACTIVATION_BYTES
    kv_in, kv_out = _kv_seconds(model, speeds, placement, step)
    return LayerCost(
        base=base,
        kv_in=kv_in / model.layers,
        kv_out=kv_out / model.layers,
        on_device=max(size / speeds.device_read, macs / speeds.device_macs),
        on_host=on_host,
        on_bus=size / speeds.to_device,
        on_disk=on_disk,
        inputs=cross / speeds.to_host,
        outputs=cross / speeds.to_device,
        foreseen=use.distinct >= FORESEEN_SHARE * model.experts,
    )


def base_seconds(model: Footprint, speeds: Speeds, placement: Placement, step: Step) -> float:
    """Attention, norms, shared experts, dense layers and the handshakes of all layers."""
    read, macs = _worker(speeds, placement)
    static = max(model.static / read, step.tokens * model.static_macs / macs)
    seen = model.attention.seen(step.depth + step.tokens / step.sequences / 2)
    attention = max(
        step.sequences * seen * model.attention.new_bytes / read,
        step.tokens * seen * model.attention.macs / macs,
    )
    return static + attention + _handshakes(model, placement)


def _worker(speeds: Speeds, placement: Placement) -> tuple[float, float]:
    """Speeds of what computes the parts that all tokens share."""
    if placement.on_device:
        return speeds.device_read, speeds.device_macs
    return speeds.host_shared or speeds.host_read, speeds.host_macs


def _handshakes(model: Footprint, placement: Placement) -> float:
    """Seconds in which the layers' launches, or without a device their calls, wait for each other."""
    if not placement.on_device:
        return model.layers * HOST_LAYER_SECONDS
    dense = model.layers - model.moe_layers
    return (MOE_LAYER_KERNELS * model.moe_layers + DENSE_LAYER_KERNELS * dense) * LAUNCH_SECONDS


def _head_seconds(model: Footprint, speeds: Speeds, placement: Placement, step: Step) -> float:
    if not step.logits:
        return 0.0
    read, macs = _worker(speeds, placement)
    return max(model.head / read, step.logits * model.head_macs / macs)


def _kv_seconds(model: Footprint, speeds: Speeds, placement: Placement, step: Step) -> tuple[float, float]:
    """Seconds of the bus in both directions for KV pages in host memory: read in, new tokens written back."""
    if placement.kv_on_device or not placement.on_device:
        return 0.0, 0.0
    attention = model.attention
    read = step.sequences * attention.seen(step.depth) * attention.new_bytes
    return read / speeds.to_device, step.tokens * attention.token_bytes / speeds.to_host


def _busy(
    model: Footprint,
    speeds: Speeds,
    placement: Placement,
    step: Step,
    layer: LayerCost,
    use: Usage,
    fetched: float,
) -> dict[Lane, float]:
    """Seconds that each lane works in a step."""
    routed = model.moe_layers
    here = use.misses - fetched
    waits = _handshakes(model, placement)
    work = base_seconds(model, speeds, placement, step) - waits
    work += _head_seconds(model, speeds, placement, step)
    kv_in, kv_out = _kv_seconds(model, speeds, placement, step)
    host = routed * here * layer.on_host
    busy: dict[Lane, float] = {"host": host, "disk": routed * use.misses * layer.on_disk, "handshakes": waits}
    if not placement.on_device:
        return {**busy, "host": host + work}
    trips, copies = routed * min(1.0, here), routed * min(1.0, fetched)
    return {
        "device": work + routed * (use.distinct - here) * layer.on_device,
        "to_device": kv_in + routed * fetched * layer.on_bus + trips * layer.outputs,
        "to_host": kv_out + trips * layer.inputs,
        **busy,
        "handshakes": waits + trips * ROUND_TRIP_SECONDS + copies * COPY_SECONDS,
    }
