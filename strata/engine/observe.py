"""Watching an engine at work: every step with the ops inside it, for timelines and traces."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from strata.backends.cpu import CpuBackend
from strata.engine.engine import Engine, StepDone
from strata.plan.plan import Plan


class OpCall(NamedTuple):
    """One op of compiled code. begin, end: seconds of time.perf_counter. layer: -1 outside of the layers.

    node_end: when the threads of each of the plan's nodes were done; 0.0 where none took part.
    """

    op: str
    shape: str
    layer: int
    begin: float
    end: float
    bytes: int
    macs: int
    node_end: Sequence[float]


class Sink(Protocol):
    """Somebody who wants to know."""

    def add(self, step: StepDone, calls: Sequence[OpCall]) -> None:
        """A step that is done. calls: its ops in order; none from a backend without a clock."""
        ...

    def close(self) -> None:
        """Nothing more comes. Called once, after an error or Ctrl-C, too."""
        ...


class Observer:
    """Hands every step of an engine to sinks between `open` and `close`. Belongs to the engine's thread."""

    def __init__(self, engine: Engine, plan: Plan, sinks: Sequence[Sink]) -> None:
        self._engine = engine
        self._sinks = sinks
        backend: Any = engine.decoder.backend
        self._clock: Any = backend.cpu if isinstance(backend, CpuBackend) else None
        self._nodes = [place for place, node in enumerate(plan.threads) for _ in node.cpus]

    def open(self) -> None:
        """Begin; nothing is handed on before."""
        if self._clock is not None:
            self._clock.start_trace(self._nodes)
        self._engine.observers.append(self._step)

    def close(self) -> None:
        """End, and close the sinks."""
        self._engine.observers.remove(self._step)
        if self._clock is not None:
            self._clock.stop_trace()
        with contextlib.ExitStack() as every:  # a full disk under one file must not spoil the others
            for sink in reversed(self._sinks):
                every.callback(sink.close)

    def _step(self, step: StepDone) -> None:
        calls: list[OpCall] = []
        if self._clock is not None:
            calls = [OpCall(*found) for found in self._clock.take_spans()]
        for sink in self._sinks:
            sink.add(step, calls)
