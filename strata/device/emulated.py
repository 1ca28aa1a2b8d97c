"""A device without hardware: virtual time, an adversarial legal order, and a race detector.

What it promises: code that runs on it without an error, under many seeds, orders every pair of conflicting
accesses; data moves in an order that a real device could have chosen. What it does not: its times come
from the figures it was given. They err on the slow side: kernels of different streams never overlap, a
copy engine serves one call at a time and in full, stream priorities do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.device.base import Copy, Event, Graph, Launch, Stream
from strata.device.buffers import (
    BoundsError,
    Buffer,
    Bytes,
    DeviceError,
    StaleGraphError,
    flat_bytes,
)
from strata.device.checks import (
    Direction,
    batch_direction,
    check_fill,
    check_reach,
    copy_direction,
    differences,
)
from strata.device.emulated_clock import Engine, HostClock
from strata.device.emulated_copies import copy_cost, movement, pageable_seconds
from strata.device.emulated_locks import PageLocks
from strata.device.emulated_memory import Memory, bytes_of, own
from strata.device.emulated_order import EmulatedEvent, EmulatedStream, Op, Order, own_event, own_stream
from strata.device.emulated_races import Shadow
from strata.device.emulated_schedule import Schedule
from strata.device.figures import DeviceFigures
from strata.device.timeline import COMPUTE, D2H, H2D, HOST, Timeline


class _Task(NamedTuple):
    """What an op is: its engine's lane and seconds, what it reads and writes, and what moves the bytes."""

    kind: str
    label: str
    lane: str
    seconds: float
    reads: Sequence[Buffer]
    writes: Sequence[Buffer]
    run: Callable[[], None] | None


class EmulatedDevice:
    """See the module's text and `strata.device.base.Device`.

    seed: of the order in which ops run; None: the order of the calls. with_data False: nothing is stored or
    computed, so that sizes may be those of a real machine; times and races stay. locks: what may be
    page-locked, anything at once unless told.
    """

    name = "emulated"

    def __init__(
        self,
        figures: DeviceFigures,
        *,
        seed: int | None = None,
        timeline: Timeline | None = None,
        with_data: bool = True,
        locks: PageLocks | None = None,
    ) -> None:
        self.figures = figures
        self.memory = Memory(figures.memory_bytes, with_data)
        self.locks = locks or PageLocks()
        self.order = Order()
        self.clock = HostClock(timeline)
        self.schedule = Schedule(seed)
        self._timeline = timeline
        self._engines = {lane: Engine() for lane in (COMPUTE, H2D, D2H)}
        self._touched: set[Shadow] = set()
        self._closed = False
        self._in_graph = False

    def watch(self, timeline: Timeline | None) -> None:
        """From now on, what runs goes into this timeline, in virtual time; None: nowhere."""
        self._timeline = timeline
        self.clock.watch(timeline)

    # Memory

    def free_bytes(self) -> int:
        """Device memory that is not allocated."""
        return self.memory.capacity - self.memory.used

    def alloc(self, nbytes: int, name: str) -> Buffer:
        """Device memory filled with POISON."""
        return self.memory.take(nbytes, "device", name)

    def host_alloc(self, nbytes: int, name: str) -> Buffer:
        """Pinned memory filled with POISON."""
        return self.memory.take(nbytes, "pinned", name)

    def host_register(self, array: NDArray[Any], name: str) -> Buffer:
        """The array's memory as pinned memory, where the rules of `locks` allow it."""
        self.clock.advance(self.locks.lock(flat_bytes(array), name))
        return self.memory.adopt(array, "pinned", name)

    def host_pageable(self, array: NDArray[Any], name: str) -> Buffer:
        """The array's memory as plain memory."""
        return self.memory.adopt(array, "pageable", name)

    def free(self, buffer: Buffer) -> None:
        """Free and poison; RaceError when an op that uses the memory is not known to be finished."""
        own(buffer).shadow.host_write(0, buffer.allocation.nbytes, self.order.known, "a call of free")
        self.memory.give_back(buffer)
        self.locks.unlock(buffer.address)

    # Streams and events

    def stream(self, name: str) -> Stream:
        """A new stream."""
        self.schedule.add_stream()
        return self.order.add_stream(name)

    def event(self, timing: bool = False) -> Event:
        """A new event."""
        return EmulatedEvent(timing)

    def record(self, event: Event, stream: Stream) -> None:
        """The event takes the stream's clock and virtual time."""
        point, source = own_event(event), self._enter(stream)
        point.clock = tuple(source.clock)
        point.time = max(source.free_at, self.clock.now)
        point.denials = self.schedule.denials()
        point.records += 1

    def wait(self, stream: Stream, event: Event) -> None:
        """The stream's next op comes after what the event has recorded."""
        point, waiting = own_event(event), self._enter(stream)
        point.require_recorded()
        self.order.wait(waiting, point)
        waiting.free_at = max(waiting.free_at, point.time)

    def sync(self, target: Stream | Event | None = None) -> None:
        """Run what is needed, let virtual time pass, and know it finished."""
        self.clock.advance(self.figures.call_s)
        for one in self.order.streams if target is None else (target,):
            self._finish(*self._point(one))

    def query(self, target: Stream | Event) -> bool:
        """Whether the target is reached at the host's virtual time.

        In an adversarial order a yes may come some calls late (the news travels) or early (then the calling
        thread was held up until the target was reached).
        """
        self.clock.advance(self.figures.call_s)
        clock, time, label = self._point(target)
        reached = time <= self.clock.now
        if reached and isinstance(target, Event) and own_event(target).denials:
            own_event(target).denials -= 1
            return False
        if reached or self.schedule.held_up():
            self._finish(clock, time, label)
            return True
        return False

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Virtual milliseconds between two events that the host knows to be reached."""
        return self.order.elapsed(own_event(start), own_event(end)) * 1e3

    # Ops

    def copy(self, dst: Buffer, src: Buffer, stream: Stream, label: str = "") -> None:
        """One copy; pageable memory is staged by the driver while the host waits."""
        direction = copy_direction(dst, src)
        if "pageable" in (dst.kind, src.kind):
            self._pageable_copy(Copy(dst, src), direction, stream, label)
            return
        lane, seconds = copy_cost(self.figures, direction, dst.nbytes, 1)
        self._copies([Copy(dst, src)], f"{direction} copy", label, lane, seconds, stream)

    def copy_batch(self, copies: Sequence[Copy], stream: Stream, label: str = "") -> None:
        """Copies without an order among themselves; they run shuffled in an adversarial order."""
        direction = batch_direction(copies)
        nbytes = sum(copy.dst.nbytes for copy in copies)
        lane, seconds = copy_cost(self.figures, direction, nbytes, len(copies))
        self._copies(copies, f"{direction} batch of {len(copies)}", label, lane, seconds, stream)

    def fill(self, dst: Buffer, value: int, stream: Stream) -> None:
        """A kernel that writes every byte once."""
        check_fill(dst, value)
        seconds = self.figures.kernel_seconds(dst.nbytes, 0)
        run = partial(bytes_of(dst).fill, value) if self.memory.with_data else None
        self._issue(_Task("fill", "", COMPUTE, seconds, (), (dst,), run), stream)

    def launch(self, launch: Launch, stream: Stream) -> None:
        """One kernel: it takes the time that its work needs by the figures."""
        check_reach(launch)
        seconds = self.figures.kernel_seconds(launch.work.nbytes, launch.work.macs)
        run = partial(launch.kernel.run, launch, 0) if self.memory.with_data else None
        kind = f"kernel {launch.kernel.name}"
        task = _Task(kind, launch.label, COMPUTE, seconds, launch.reads, launch.writes, run)
        self._issue(task, stream)

    # Graphs

    def capture(self, launches: Sequence[Launch], stream: Stream) -> Graph:
        """The launches as they are: what their arguments are now."""
        return Graph(launches)

    def replay(
        self, graph: Graph, stream: Stream, now: Callable[[], Sequence[Launch]], label: str = ""
    ) -> None:
        """One call of the host; kernels are checked and run one by one, with the captured arguments."""
        fresh = now()
        found = differences(graph.launches, fresh)
        if found:
            raise StaleGraphError(
                f"a graph is replayed that no longer fits: {found}",
                remedy="keep what changes between replays in memory, or capture anew",
            )
        self.clock.advance(self.figures.call_s)
        self._in_graph = True
        try:
            for old, new in zip(graph.launches, fresh, strict=True):
                self.launch(
                    replace(old, reads=new.reads, writes=new.writes, label=label or new.label), stream
                )
        finally:
            self._in_graph = False

    def free_graph(self, graph: Graph) -> None:
        """Nothing is held."""

    # The host's side

    def host_read(self, buffer: Buffer) -> Bytes:
        """The bytes, read-only; RaceError when a write by the device is not known to be finished."""
        self._host_access(buffer, write=False)
        view = bytes_of(buffer).view()
        view.flags.writeable = False
        return view

    def host_write(self, buffer: Buffer) -> Bytes:
        """The bytes; RaceError when an access by the device is not known to be finished."""
        self._host_access(buffer, write=True)
        return bytes_of(buffer)

    def host_copy(self, dst: Buffer, src: Buffer) -> None:
        """Checked like host_read and host_write; takes the time of one thread's copy."""
        if dst.nbytes != src.nbytes or dst.overlaps(src):
            raise BoundsError(
                f"{src} cannot be copied to {dst}", remedy="give two disjoint ranges of one size"
            )
        self._host_access(src, write=False)
        self._host_access(dst, write=True)
        if self.memory.with_data:
            np.copyto(bytes_of(dst), bytes_of(src))
        self.clock.work({HOST: dst.nbytes / self.figures.host_copy_bytes_per_s}, "host copy")

    def host_work(self, seconds: Mapping[str, float], label: str = "") -> None:
        """CPU work on lanes side by side, which the calling thread waits for."""
        self.clock.work(seconds, label or "work")

    def now(self) -> float:
        """Virtual seconds since the device was made."""
        return self.clock.now

    def check_integrity(self) -> None:
        """No byte outside an allocation was written, and device memory is counted right."""
        self.memory.check_integrity()

    def close(self) -> None:
        """Run everything, check the guards, free everything."""
        if self._closed:
            return
        self.sync()
        self.memory.check_integrity()
        for allocation in self.memory.live:
            self.memory.give_back(allocation.whole())
        self._closed = True

    # Inside

    def _copies(
        self, copies: Sequence[Copy], kind: str, label: str, lane: str, seconds: float, stream: Stream
    ) -> Op:
        reads, writes = [copy.src for copy in copies], [copy.dst for copy in copies]
        run = movement(copies, self.schedule) if self.memory.with_data else None
        return self._issue(_Task(kind, label, lane, seconds, reads, writes, run), stream)

    def _pageable_copy(self, copy: Copy, direction: Direction, stream: Stream, label: str) -> None:
        """Host to device: the source is taken before the call returns, its arrival may lag behind.
        Device to host: the call returns when the bytes are there."""
        kind, seconds = (
            f"pageable {direction} copy",
            pageable_seconds(self.figures, direction, copy.dst.nbytes),
        )
        if direction == "d2h":
            op = self._copies([copy], kind, label, direction, seconds, stream)
            self._finish(op.stream.clock, op.stream.free_at, kind)
            return
        run = None
        if self.memory.with_data:
            run = partial(np.copyto, bytes_of(copy.dst), bytes_of(copy.src).copy())
        op = self._issue(_Task(kind, label, direction, seconds, (), (copy.dst,), run), stream)
        self.clock.wait_until(op.stream.free_at, kind)

    def _issue(self, task: _Task, stream: Stream) -> Op:
        """Give an op its virtual time, leave it to the schedule, and check it against all before it.

        The check comes last: a race is a report about an op that runs all the same, as it would in reality.
        """
        shadows = [self._shadow(buffer) for buffer in (*task.reads, *task.writes)]
        entered = self._enter(stream)
        op = self.order.issue(entered, task.kind, task.label, task.run)
        now = self.clock.now
        start = self._engines[task.lane].place(max(entered.free_at, now), task.seconds, now)
        entered.free_at = start + task.seconds
        if self._timeline is not None:
            name = task.label or task.kind
            self._timeline.add(task.lane, name, start, entered.free_at, op=task.kind, stream=entered.name)
        self.schedule.add(op)
        known = self.order.known
        for shadow, buffer in zip(shadows, task.reads, strict=False):
            shadow.read(buffer.offset, buffer.offset + buffer.nbytes, op, known)
        for shadow, buffer in zip(shadows[len(task.reads) :], task.writes, strict=True):
            shadow.write(buffer.offset, buffer.offset + buffer.nbytes, op)
        return op

    def _enter(self, stream: Stream) -> EmulatedStream:
        """Every call takes host time, and its op comes after all that the host knows."""
        if self._closed:
            raise DeviceError("the device is closed", remedy="close it last")
        if not self._in_graph:
            self.clock.advance(self.figures.call_s)
        entered = own_stream(stream)
        self.order.enter(entered)
        return entered

    def _shadow(self, buffer: Buffer) -> Shadow:
        allocation = own(buffer)
        if allocation.freed:
            buffer.require_live()
        self._touched.add(allocation.shadow)
        return allocation.shadow

    def _host_access(self, buffer: Buffer, write: bool) -> None:
        buffer.require_host()
        shadow, known = own(buffer).shadow, self.order.known
        if write:
            buffer.require_writable()
            shadow.host_write(buffer.offset, buffer.end, known, "the host")
        else:
            shadow.host_read(buffer.offset, buffer.end, known, "the host")

    def _point(self, target: Stream | Event) -> tuple[Sequence[int], float, str]:
        if isinstance(target, Event):
            event = own_event(target)
            event.require_recorded()
            return event.clock, event.time, "sync event"
        stream = own_stream(target)
        return stream.clock, stream.free_at, f"sync {stream.name}"

    def _finish(self, clock: Sequence[int], time: float, label: str) -> None:
        """The host waits for everything that the clock counts."""
        self.schedule.run_until(clock)
        self.clock.wait_until(time, label)
        self.order.learn(clock)
        if self.order.knows_everything():
            for shadow in self._touched:
                shadow.clear()
            self._touched.clear()
