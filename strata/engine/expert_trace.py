"""Recording what the routers chose while an engine serves: the trace that `strata trace replay` reads."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.expert_flow import LayerServed
from strata.engine.engine import StepDone
from strata.engine.observe import OpCall
from strata.engine.scheduler import Work
from strata.errors import UnsupportedError
from strata.memory.experts import ExpertSpace
from strata.memory.trace import TraceWriter
from strata.memory.trace_format import MAX_MICROSECONDS, Access, Outcome, TraceHeader
from strata.model.decoder import Decoder

KEPT_REQUESTS = 1024
"""Requests whose number is remembered; a recording must not grow with every request it has seen."""
SEVERAL = 0
"""The sequence of steps that hold several requests."""


class ExpertTrace:
    """A sink of `Observer` that appends to a new file: one access per step and layer.

    Prompt tokens and decoding of one step are two accesses, for they are replayed differently. Microseconds
    are the CPU's for the layer, shared equally among the experts that it computed: it computes them in one
    go. Fetches overlap with everything, so only their bytes are told. Raises FileExistsError, and
    UnsupportedError for a model without experts.
    """

    def __init__(self, path: Path, decoder: Decoder) -> None:
        router = decoder.spec.experts.router if decoder.spec.experts else None
        if router is None or not decoder.expert_bytes:
            raise UnsupportedError(
                f"{decoder.spec.name} has no experts: there is nothing to record",
                remedy="record an MoE model",
            )
        counts = tuple(router.experts if decoder.spec.is_moe(i) else 0 for i in range(decoder.spec.layers))
        sizes = tuple(decoder.expert_bytes.get(layer, 0) for layer in range(decoder.spec.layers))
        self._decoder = decoder
        self._writer = TraceWriter(path, TraceHeader(decoder.spec.name, ExpertSpace(counts), sizes))
        self._steps: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._known = self._several = 0

    def add(self, step: StepDone, calls: Sequence[OpCall]) -> None:
        """What the step's routers chose."""
        costs = self._costs(calls)
        for prefill in (True, False):
            rows = list(_rows(step.works, prefill))
            if not rows:
                continue
            sequence, number = self._place([work for work in step.works if work.is_prefill == prefill])
            for layer, ids in sorted(self._decoder.routes.ids.items()):
                experts = tuple(np.unique(ids[rows]).tolist())
                access = Access(sequence, number, layer, experts, len(rows), prefill)
                self._writer.add(_with_costs(access, costs[layer]) if layer in costs else access)

    def _costs(self, calls: Sequence[OpCall]) -> dict[int, LayerServed]:
        """How each layer's experts were answered; layers of which nothing is known are left out."""
        backend = self._decoder.backend
        if isinstance(backend, HybridBackend):
            return backend.flow.served
        ids = self._decoder.routes.ids
        return {
            layer: LayerServed((), (), tuple(np.unique(ids[layer]).tolist()), 0, seconds)
            for layer, seconds in _experts_seconds(calls).items()
        }

    def close(self) -> None:
        """The file is whole."""
        self._writer.close()

    def _place(self, works: Sequence[Work]) -> tuple[int, int]:
        """Sequence and step of these works."""
        if len(works) > 1:
            self._several += 1
            return SEVERAL, self._several - 1
        request = works[0].request.request_id
        if request not in self._steps:
            self._known += 1
            self._steps[request] = (self._known, 0)
        number, count = self._steps[request]
        self._steps[request] = (number, count + 1)
        if len(self._steps) > KEPT_REQUESTS:
            self._steps.popitem(last=False)
        return number, count


def _with_costs(access: Access, served: LayerServed) -> Access:
    """The access with what became of each expert."""
    each = min(MAX_MICROSECONDS, round(1e6 * served.seconds / max(1, len(served.computed))))
    outcomes = tuple(_outcome(expert, served) for expert in access.experts)
    return dataclasses.replace(
        access,
        outcomes=outcomes,
        bytes=tuple(served.nbytes if outcome is Outcome.FETCH else 0 for outcome in outcomes),
        microseconds=tuple(each if outcome is Outcome.CPU else 0 for outcome in outcomes),
    )


def _outcome(expert: int, served: LayerServed) -> Outcome:
    if expert in served.hits:
        return Outcome.HIT
    return Outcome.FETCH if expert in served.fetched else Outcome.CPU


def _rows(works: Sequence[Work], prefill: bool) -> Iterator[int]:
    """Rows of the step's batch that belong to prompts, or to decoding."""
    first = 0
    for work in works:
        if work.is_prefill == prefill:
            yield from range(first, first + work.count)
        first += work.count


def _experts_seconds(calls: Sequence[OpCall]) -> dict[int, float]:
    """Seconds of the experts of each layer, as far as the backend has a clock."""
    found: dict[int, float] = {}
    for call in calls:
        if call.op == "experts" and call.layer >= 0:
            found[call.layer] = found.get(call.layer, 0.0) + call.end - call.begin
    return found
