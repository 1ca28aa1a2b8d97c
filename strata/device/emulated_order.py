"""Order on the emulated device: vector clocks of streams, events and the host.

A clock counts ops per stream: entry i says how many ops of stream i are known to come before. A stream's
own entry counts its issued ops; entry 0 is unused, so that a stream's index is its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.device.base import Event, Stream
from strata.device.buffers import DeviceError, EventError

Clock = list[int]


class EmulatedStream(Stream):
    """A stream and what precedes its next op.

    free_at: virtual end of its last op. host_version: of the host's knowledge when it was last merged into
    `clock`. waits: (stream, op count) pairs that the next op must find done beside its own predecessor.
    """

    __slots__ = ("clock", "free_at", "host_version", "index", "waits")

    def __init__(self, name: str, index: int, clock: Clock, host_version: int) -> None:
        super().__init__(name)
        self.index = index
        self.clock = clock
        self.free_at = 0.0
        self.host_version = host_version
        self.waits: list[tuple[int, int]] = []


class EmulatedEvent(Event):
    """clock and time: of the recorded point. denials: queries that are told no although it is reached."""

    __slots__ = ("clock", "denials", "time")

    def __init__(self, timing: bool) -> None:
        super().__init__(timing)
        self.clock: tuple[int, ...] = ()
        self.time = 0.0
        self.denials = 0


class Op:
    """Something issued to a stream. `run` moves the data, once; None when it has run or moves none."""

    __slots__ = ("kind", "label", "number", "run", "stream", "waits")

    def __init__(self, kind: str, label: str, stream: EmulatedStream, run: Callable[[], None] | None) -> None:
        self.kind = kind
        self.label = label
        self.stream = stream
        self.number = stream.clock[stream.index]
        self.waits = stream.waits
        self.run = run

    def __str__(self) -> str:
        label = f" '{self.label}'" if self.label else ""
        return f"{self.kind}{label} (op {self.number} of stream '{self.stream.name}')"


class Order:
    """Who comes before whom. known: what the host knows to be finished; every later op comes after that.

    redundant_waits counts waits that ordered nothing new: harmless, but each costs a call.
    """

    def __init__(self) -> None:
        self.known: Clock = [0]
        self.streams: list[EmulatedStream] = []
        self.redundant_waits = 0
        self._version = 0

    def add_stream(self, name: str) -> EmulatedStream:
        """A new stream, with a new entry in every clock."""
        self.known.append(0)
        for other in self.streams:
            other.clock.append(0)
        stream = EmulatedStream(name, len(self.known) - 1, list(self.known), self._version)
        self.streams.append(stream)
        return stream

    def enter(self, stream: EmulatedStream) -> None:
        """A call is made on the stream: it comes after all that the host knows."""
        if stream.host_version != self._version:
            merge(stream.clock, self.known)
            stream.host_version = self._version

    def issue(self, stream: EmulatedStream, kind: str, label: str, run: Callable[[], None] | None) -> Op:
        """The stream's next op; it takes the waits that were made since the last."""
        stream.clock[stream.index] += 1
        op = Op(kind, label, stream, run)
        stream.waits = []
        return op

    def wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """The stream's next op comes after the event's point."""
        clock, before = stream.clock, len(stream.waits)
        for index, count in enumerate(event.clock):
            if count > clock[index]:
                clock[index] = count
                stream.waits.append((index, count))
        self.redundant_waits += len(stream.waits) == before

    def learn(self, clock: Sequence[int]) -> None:
        """The host knows that everything the clock counts is finished."""
        merge(self.known, clock)
        self._version += 1

    def knows(self, clock: Sequence[int]) -> bool:
        """Whether everything the clock counts is known to be finished."""
        return all(self.known[index] >= count for index, count in enumerate(clock))

    def elapsed(self, start: EmulatedEvent, end: EmulatedEvent) -> float:
        """Virtual seconds between two events; EventError unless the host knows that they were reached."""
        for event in (start, end):
            event.require_recorded()
            if not event.timing:
                raise EventError("an event without timing has no time", remedy="make it with timing=True")
            if not self.knows(event.clock):
                raise EventError("an event is not known to be reached", remedy="sync on it first")
        return end.time - start.time

    def knows_everything(self) -> bool:
        """Whether every op issued so far is known to be finished."""
        return all(self.known[stream.index] == stream.clock[stream.index] for stream in self.streams)


def merge(clock: Clock, other: Sequence[int]) -> None:
    """Raise every entry to the other's; `other` may be from before the newest streams."""
    for index, count in enumerate(other):
        if count > clock[index]:
            clock[index] = count


def own_stream(stream: Stream) -> EmulatedStream:
    """The stream as this device made it; DeviceError for one of another device."""
    if not isinstance(stream, EmulatedStream):
        raise DeviceError(f"stream '{stream.name}' is of another device", remedy="use device.stream")
    return stream


def own_event(event: Event) -> EmulatedEvent:
    """The event as this device made it; DeviceError for one of another device."""
    if not isinstance(event, EmulatedEvent):
        raise DeviceError("the event is of another device", remedy="use device.event")
    return event
