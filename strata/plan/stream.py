"""The ring of device buffers through which a prompt's experts stream: how many, and how long each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.plan.cost import Placement, Step, base_seconds
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.speeds import Speeds

STREAM_EXPERTS = 4
"""Experts of one buffer; assumed."""
LEAST_BUFFERS = 2
"""One fills while the other is computed from."""
MOST_BYTES = 1 << 30
"""Of the ring; assumed. What crosses ahead is worth less than the slots that more would cost."""
AUTO_DEPTH = 4096
"""Tokens of context for which the ring is sized where the context is left to the plan, which decides it from
what the ring leaves."""


@dataclass(frozen=True)
class StreamRing:
    """`buffers` device buffers for `experts` experts each."""

    buffers: int
    experts: int

    @property
    def places(self) -> int:
        """Experts in all buffers together."""
        return self.buffers * self.experts


def stream_ring(model: Footprint, speeds: Speeds, options: PlanOptions, room: int | None) -> StreamRing:
    """A ring that keeps the bus busy while a prompt's chunk goes through attention.

    What crosses meanwhile has to lie somewhere: more buffers the longer attention takes, LEAST_BUFFERS at
    least, a layer's experts, MOST_BYTES or `room` bytes (None: no limit) at most.
    """
    if not model.moe_layers:
        return StreamRing(LEAST_BUFFERS, STREAM_EXPERTS)
    context = min(model.context, AUTO_DEPTH) if options.context is None else options.context
    step = Step.prefill(options.chunk, context // 2)
    # Where experts and KV pages are does not change how long attention takes.
    place = Placement(on_device=True, slots=0, kv_on_device=True, in_memory=0)
    before = base_seconds(model, speeds, place, step) / model.layers
    crossing = before * speeds.to_device / model.expert_bytes
    most = -(-model.experts // STREAM_EXPERTS)
    limit = MOST_BYTES if room is None else min(MOST_BYTES, room)
    fitting = limit // (STREAM_EXPERTS * model.expert_bytes)
    return StreamRing(
        max(LEAST_BUFFERS, min(most, fitting, 1 + math.ceil(crossing / STREAM_EXPERTS))), STREAM_EXPERTS
    )
