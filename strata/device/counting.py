"""An emulated device that stores and computes nothing and counts what the host asks of it.

What it counts is what a GPU would be asked: the code above it is the same. Memory that the device would have
written reads as zeros, unless `answer` says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from strata.device.base import Copy, Event, Graph, Launch, Stream
from strata.device.buffers import Buffer, Bytes
from strata.device.checks import batch_direction, copy_direction
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_order import own_event
from strata.device.figures import DeviceFigures


@dataclass
class Calls:
    """Calls since the count began. launches: by (label, kernel); copies and copied (bytes): by direction, a
    batch being one. fills: of device memory. read_backs: waits for an event, by what was waited for last;
    synchronisations: waits for a stream or the whole device. ordering: events recorded and waited for by
    streams; queries: questions that do not wait; captures: of graphs, a replay of which is one launch."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    fills: int = 0
    read_backs: Counter[str] = field(default_factory=Counter)
    synchronisations: int = 0
    ordering: int = 0
    queries: int = 0
    captures: int = 0

    @property
    def all(self) -> int:
        """Calls of the driver."""
        waits = sum(self.read_backs.values()) + self.synchronisations
        ops = self.launches.total() + self.copies.total() + self.fills
        return ops + waits + self.ordering + self.queries


class CountingDevice(EmulatedDevice):
    """calls: so far; put a new `Calls` there to begin anew. answer: of the memory that the host reads, None
    for zeros."""

    def __init__(self, figures: DeviceFigures, answer: Callable[[Buffer], Bytes | None]) -> None:
        super().__init__(figures, with_data=False)
        self.calls = Calls()
        self.answer = answer
        self._copied_last = ""

    def launch(self, launch: Launch, stream: Stream) -> None:
        """One more of its label and name, unless it is one of a graph's."""
        if not self._in_graph:
            self.calls.launches[launch.label, launch.kernel.name] += 1
        super().launch(launch, stream)

    def capture(self, launches: Sequence[Launch], stream: Stream) -> Graph:
        """One more capture; its cost is not a step's."""
        self.calls.captures += 1
        return super().capture(launches, stream)

    def replay(
        self, graph: Graph, stream: Stream, now: Callable[[], Sequence[Launch]], label: str = ""
    ) -> None:
        """One launch, of so many kernels."""
        self.calls.launches[label, f"graph of {len(graph.launches)}"] += 1
        super().replay(graph, stream, now, label)

    def copy(self, dst: Buffer, src: Buffer, stream: Stream, label: str = "") -> None:
        """One more of its direction."""
        self._count_copies([Copy(dst, src)], copy_direction(dst, src), label)
        super().copy(dst, src, stream, label)

    def copy_batch(self, copies: Sequence[Copy], stream: Stream, label: str = "") -> None:
        """One call, however many copies."""
        self._count_copies(copies, batch_direction(copies), label)
        super().copy_batch(copies, stream, label)

    def fill(self, dst: Buffer, value: int, stream: Stream) -> None:
        """A launch in all but name."""
        self.calls.fills += 1
        super().fill(dst, value, stream)

    def record(self, event: Event, stream: Stream) -> None:
        """Orders streams, or times."""
        self.calls.ordering += 1
        super().record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Orders streams."""
        self.calls.ordering += 1
        super().wait(stream, event)

    def sync(self, target: Stream | Event | None = None) -> None:
        """A wait of the host, or the question whether it must wait for what it knows to be over."""
        if isinstance(target, Event) and self.order.knows(own_event(target).clock):
            self.calls.queries += 1
        elif isinstance(target, Event):
            self.calls.read_backs[self._copied_last] += 1
        else:
            self.calls.synchronisations += 1
        super().sync(target)

    def query(self, target: Stream | Event) -> bool:
        """A question."""
        self.calls.queries += 1
        return super().query(target)

    def host_read(self, buffer: Buffer) -> Bytes:
        """Made up: nothing was computed. The races are looked for all the same."""
        self._host_access(buffer, write=False)
        found = self.answer(buffer)
        return np.zeros(buffer.nbytes, np.uint8) if found is None else found

    def host_write(self, buffer: Buffer) -> Bytes:
        """Memory that nobody reads."""
        self._host_access(buffer, write=True)
        return np.empty(buffer.nbytes, np.uint8)

    def _count_copies(self, copies: Sequence[Copy], direction: str, label: str) -> None:
        self.calls.copies[direction] += 1
        self.calls.copied[direction] += sum(copy.dst.nbytes for copy in copies)
        if direction == "d2h":
            self._copied_last = label or direction
