"""Random programs for the emulated device, and a second, slow opinion about what precedes what.

The oracle keeps, for every stream, event and for the host, the set of all ops that come before; and for
every byte the list of all its accesses. The device does the same with vector clocks and segments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from device_figures import ROUND

from strata.device.base import Buffer, Event, Launch, Stream
from strata.device.emulated import EmulatedDevice
from strata.device.python_kernel import PythonKernel

STREAMS, EVENTS, BYTES = 3, 3, 24

Step = tuple[Any, ...]
Span = tuple[int, int]


def random_program(rng: random.Random, length: int) -> list[Step]:
    """Steps of all kinds, mostly such that order: otherwise every op would race."""
    return [_random_step(rng) for _ in range(length)]


def _random_step(rng: random.Random) -> Step:
    stream, event = rng.randrange(STREAMS), rng.randrange(EVENTS)
    kind = rng.choice(("op", "op", "op", "record", "record", "wait", "wait", "order", "host"))
    if kind == "op":
        return "op", stream, _spans(rng), _spans(rng)
    if kind == "record":
        return kind, event, stream
    if kind == "wait":
        return kind, stream, event
    if kind == "host":
        return rng.choice(("host_read", "host_write")), _span(rng)
    return rng.choice((("sync_stream", stream), ("sync_event", event), ("sync_event", event), ("sync_all",)))


def _spans(rng: random.Random) -> list[Span]:
    return [_span(rng) for _ in range(rng.choice((0, 1, 1, 2)))]


def _span(rng: random.Random) -> Span:
    """Few borders, so that ranges are often the same, neighbours, or halves of each other."""
    start = rng.randrange(BYTES // 4) * 4
    return start, min(BYTES, start + rng.choice((2, 4, 4, 8, 16)))


@dataclass
class Oracle:
    """Sets of op numbers; `accesses` has (op, is a write) per byte."""

    streams: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS)])
    events: list[set[int] | None] = field(default_factory=lambda: [None] * EVENTS)
    host: set[int] = field(default_factory=set)
    accesses: list[list[tuple[int, bool]]] = field(default_factory=lambda: [[] for _ in range(BYTES)])
    before: list[set[int]] = field(default_factory=list)

    def conflicts(self, known: set[int], spans: list[Span], write: bool) -> bool:
        found = (entry for start, end in spans for byte in range(start, end) for entry in self.accesses[byte])
        return any((write or wrote) and op not in known for op, wrote in found)

    def races(self, step: Step) -> bool:
        """Whether the step would race; changes nothing."""
        match step:
            case ("op", stream, reads, writes):
                known = self.streams[stream] | self.host
                return self.conflicts(known, reads, False) or self.conflicts(known, writes, True)
            case ("host_read" | "host_write" as kind, span):
                return self.conflicts(self.host, [span], kind == "host_write")
        return False

    def apply(self, step: Step) -> None:
        """Make the step."""
        match step:
            case ("op", stream, reads, writes):
                self.issue(stream, reads, writes)
            case ("record", event, stream):
                self.events[event] = self.streams[stream] | self.host
            case ("wait", stream, event):
                self.streams[stream] |= self.events[event] or set()
            case ("sync_stream", stream):
                self.host |= self.streams[stream]
            case ("sync_event", event):
                self.host |= self.events[event] or set()
            case ("sync_all",):
                self.host |= set(range(len(self.before)))

    def issue(self, stream: int, reads: list[Span], writes: list[Span]) -> None:
        known = self.streams[stream] | self.host
        number = len(self.before)
        self.before.append(known)
        for spans, write in ((reads, False), (writes, True)):
            for start, end in spans:
                for byte in range(start, end):
                    self.accesses[byte].append((number, write))
        self.streams[stream] = known | {number}


class Machine:
    """A device with pinned memory that kernels and host share, and a log of the ops in the order they ran."""

    def __init__(self, seed: int | None) -> None:
        self.device = EmulatedDevice(ROUND, seed=seed)
        self.streams: list[Stream] = [self.device.stream(f"s{i}") for i in range(STREAMS)]
        self.events: list[Event] = [self.device.event() for _ in range(EVENTS)]
        self.memory = self.device.host_alloc(BYTES, "memory")
        self.log: list[int] = []
        self.count = 0

    def step(self, step: Step, touch: bool = True) -> None:
        """One step; with `touch` False the ops name no memory, so that nothing can race."""
        device = self.device
        match step:
            case ("op", stream, reads, writes):
                ranges = [self.buffers(spans) if touch else () for spans in (reads, writes)]
                kernel = PythonKernel("op", self.logger(self.count))
                self.count += 1
                device.launch(Launch(kernel, *ranges), self.streams[stream])
            case ("record", event, stream):
                device.record(self.events[event], self.streams[stream])
            case ("wait", stream, event):
                if self.events[event].recorded:
                    device.wait(self.streams[stream], self.events[event])
            case ("sync_stream", stream):
                device.sync(self.streams[stream])
            case ("sync_event", event):
                if self.events[event].recorded:
                    device.sync(self.events[event])
            case ("sync_all",):
                device.sync()
            case (kind, span) if touch:
                getattr(device, kind)(self.buffers([span])[0])

    def buffers(self, spans: list[Span]) -> tuple[Buffer, ...]:
        return tuple(self.memory.slice(start, end - start) for start, end in spans)

    def logger(self, number: int) -> Callable[[Any, Any], None]:
        return lambda reads, writes: self.log.append(number)
