"""The device layer's protocol: one scheduling code above it, with and without a GPU.

Rules that hold on every device:
- Ops of one stream run in the order of their calls; ops of two streams run in any order unless an event
  (`record` on one, `wait` on the other) orders them. Everything the host knows to be finished (`sync`, a
  `query` that said yes) is finished for every later call.
- A call returns before its op has run. Buffers, and pinned memory that an op reads, must stay as they are
  until the op is known to be finished. Copies from or to pageable memory block the calling thread.
- Copies of one batch have no order among themselves.
- One thread calls the device. Streams and events live until `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from strata.device.buffers import (
    Allocation,
    BoundsError,
    Buffer,
    BufferKind,
    BufferKindError,
    Bytes,
    DeviceError,
    EventError,
    FreedBufferError,
    RaceError,
    StaleGraphError,
)

__all__ = [
    "Allocation",
    "BoundsError",
    "Buffer",
    "BufferKind",
    "BufferKindError",
    "ByValue",
    "Bytes",
    "Copy",
    "Device",
    "DeviceError",
    "Event",
    "EventError",
    "FreedBufferError",
    "Graph",
    "Kernel",
    "Launch",
    "RaceError",
    "StaleGraphError",
    "Stream",
    "Work",
]


class Copy(NamedTuple):
    """One copy of a batch; both sides have the same size."""

    dst: Buffer
    src: Buffer


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel must do at least: bytes of device memory moved, multiply-accumulates made."""

    nbytes: int = 0
    macs: int = 0


class Kernel(Protocol):
    """A compiled entry, or a Python function in its place."""

    @property
    def name(self) -> str:
        """As it appears in errors and on the timeline."""
        ...

    def run(self, launch: Launch, stream: int) -> None:
        """Enqueue on the raw stream (a CUstream); the emulated device passes 0: compute before returning."""
        ...


@dataclass(frozen=True, slots=True)
class ByValue:
    """An argument that is a struct: its bytes, which the launch carries itself."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a kernel.

    arguments: what the kernel's entry takes, buffers as addresses. reads and writes: every range that it
    touches (one that is updated in place stands in both); the race detector believes them. work: what
    virtual time is computed from. label: for the timeline, e.g. "layer 3".
    """

    kernel: Kernel
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    work: Work = Work()
    arguments: tuple[Buffer | ByValue | int | float, ...] = ()
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    label: str = ""


class Graph:
    """Launches that were captured, in their order; arguments are those of then. handle: the raw
    cudaGraphExec_t, 0 on the emulated device."""

    __slots__ = ("handle", "launches")

    def __init__(self, launches: Sequence[Launch], handle: int = 0) -> None:
        self.launches = tuple(launches)
        self.handle = handle


class Stream:
    """A queue of ops on one device. handle: the raw CUstream, 0 on the emulated device."""

    __slots__ = ("handle", "name")

    def __init__(self, name: str, handle: int = 0) -> None:
        self.name = name
        self.handle = handle


class Event:
    """A point in a stream. Recording it again moves it; waits already made keep the old point.

    records: how often it was recorded; the same number means the same point.
    """

    __slots__ = ("records", "timing")

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.records = 0

    @property
    def recorded(self) -> bool:
        """Whether it has a point."""
        return self.records > 0

    def require_recorded(self) -> None:
        """EventError before the first record (the driver would let such a wait pass silently)."""
        if not self.recorded:
            raise EventError("an event is used before it was recorded", remedy="record it on a stream first")


class Device(Protocol):
    """One accelerator. Wrong calls raise the errors of `strata.device.buffers`."""

    name: str

    def free_bytes(self) -> int:
        """Device memory that alloc could still give."""
        ...

    def alloc(self, nbytes: int, name: str) -> Buffer:
        """Device memory, aligned to 256 bytes, contents undefined; CapacityError when there is not enough."""
        ...

    def host_alloc(self, nbytes: int, name: str) -> Buffer:
        """Page-locked host memory, aligned to 4096 bytes, contents undefined."""
        ...

    def host_register(self, array: NDArray[Any], name: str) -> Buffer:
        """Page-lock existing memory (an arena, a mapped file); `free` unlocks it and leaves it alive.

        PageLockError where the driver does not lock it; nothing has changed then.
        """
        ...

    def host_pageable(self, array: NDArray[Any], name: str) -> Buffer:
        """A buffer over plain host memory: its copies are slow and block."""
        ...

    def free(self, buffer: Buffer) -> None:
        """Give back an allocation, named by the buffer that covers all of it; nothing may still use it."""
        ...

    def stream(self, name: str) -> Stream:
        """A new stream that does not synchronise with any other."""
        ...

    def event(self, timing: bool = False) -> Event:
        """A new event; only one with timing may be given to elapsed_ms."""
        ...

    def copy(self, dst: Buffer, src: Buffer, stream: Stream, label: str = "") -> None:
        """Copy between host and device or inside the device."""
        ...

    def copy_batch(self, copies: Sequence[Copy], stream: Stream, label: str = "") -> None:
        """Copies of one direction between device and pinned memory, as one op with one handshake."""
        ...

    def fill(self, dst: Buffer, value: int, stream: Stream) -> None:
        """Set every byte of device memory."""
        ...

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Run a kernel."""
        ...

    def capture(self, launches: Sequence[Launch], stream: Stream) -> Graph:
        """The launches as one, for `replay` on this stream; nothing runs. It lives until free_graph or close.

        Arguments are kept as they are: what changes between replays must lie in memory."""
        ...

    def replay(
        self, graph: Graph, stream: Stream, now: Callable[[], Sequence[Launch]], label: str = ""
    ) -> None:
        """Run a graph's launches, one after the other, by one call.

        now: what would be launched in its place. A device that checks asks for it: StaleGraphError when an
        argument differs; the ranges that are read and written are these. A GPU never asks.
        """
        ...

    def free_graph(self, graph: Graph) -> None:
        """Forget a graph; its replays may still be running."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event is reached when everything called so far on the stream has run."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Later ops of the stream run after the event's last record."""
        ...

    def sync(self, target: Stream | Event | None = None) -> None:
        """Block the host until the stream is empty, the event is reached, or (None) all streams are empty."""
        ...

    def query(self, target: Stream | Event) -> bool:
        """Whether sync would return at once. Yes orders like sync; no promises nothing."""
        ...

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds between two events with timing that were both reached; else EventError."""
        ...

    def host_read(self, buffer: Buffer) -> Bytes:
        """Host memory as a read-only array u8 [nbytes]: use it before the next op that writes there."""
        ...

    def host_write(self, buffer: Buffer) -> Bytes:
        """Host memory as an array u8 [nbytes]: fill it before the next op that reads there."""
        ...

    def host_copy(self, dst: Buffer, src: Buffer) -> None:
        """Copy between host buffers by the calling thread."""
        ...

    def host_work(self, seconds: Mapping[str, float], label: str = "") -> None:
        """CPU work that the calling thread waited for: seconds per lane ("host", "socket 0", "disk", ...).

        Lanes work side by side and virtual time moves on by the longest; real time has passed by itself.
        """
        ...

    def now(self) -> float:
        """Seconds on the device's clock: virtual time on the emulated device, a monotonic clock else."""
        ...

    def close(self) -> None:
        """Wait for all work and give everything back; buffers are freed. Harmless when repeated."""
        ...
