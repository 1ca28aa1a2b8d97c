"""The device layer on an NVIDIA GPU, through cupy's bindings of the CUDA runtime.

Written, not yet run on hardware: tests know only that the calls have the arguments they should have.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.device.base import Copy, Event, Graph, Launch, Stream
from strata.device.buffers import (
    Allocation,
    BoundsError,
    Buffer,
    BufferKind,
    Bytes,
    DeviceError,
    EventError,
    PageLockError,
    bytes_at,
    flat_bytes,
)
from strata.device.checks import batch_direction, check_fill, copy_direction
from strata.device.cuda_batch import BatchCopy, find_batch_copy, load_driver
from strata.errors import CapacityError, HardwareError

# Names and values of cuda_runtime_api.h that cupy does not export.
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY, HOST_REGISTER_READ_ONLY_SUPPORTED = 8, 113
OUT_OF_MEMORY = 2
NOT_READY = 600


class CudaEvent(Event):
    """handle: the raw cudaEvent_t."""

    __slots__ = ("handle",)

    def __init__(self, timing: bool, handle: int) -> None:
        super().__init__(timing)
        self.handle = handle


class CudaDevice:
    """One GPU, used by the thread that made this object. HardwareError without cupy or without a GPU."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self._runtime = _cuda_runtime()
        self._index = index
        self._call("setDevice", index)
        self._batch_copy: BatchCopy | None = find_batch_copy(load_driver())
        self._live: list[Allocation] = []
        self._streams: list[Stream] = []
        self._events: list[CudaEvent] = []
        self._graphs: list[Graph] = []

    @property
    def arch(self) -> str:
        """What kernels are compiled for, such as "sm_86"."""
        parts = (self._call("deviceGetAttribute", of, self._index) for of in (COMPUTE_MAJOR, COMPUTE_MINOR))
        return "sm_{}{}".format(*parts)

    # Memory

    def free_bytes(self) -> int:
        """What the driver says is free, other processes' use included."""
        free, _ = self._call("memGetInfo")
        return int(free)

    def alloc(self, nbytes: int, name: str) -> Buffer:
        """cudaMalloc."""
        return self._own(self._take("malloc", name, nbytes), nbytes, "device", name)

    def host_alloc(self, nbytes: int, name: str) -> Buffer:
        """cudaHostAlloc."""
        address = self._take("hostAlloc", name, nbytes, self._runtime.hostAllocPortable)
        return self._own(address, nbytes, "pinned", name)

    def host_register(self, array: NDArray[Any], name: str) -> Buffer:
        """cudaHostRegister; read-only memory (a mapped file) is registered as such, where the driver can:
        others need write access to what they lock, so that a mapping must be copied."""
        flat = flat_bytes(array)
        flags = HOST_REGISTER_PORTABLE
        if not flat.flags.writeable:
            flags |= HOST_REGISTER_READ_ONLY
            if not self._call("deviceGetAttribute", HOST_REGISTER_READ_ONLY_SUPPORTED, self._index):
                raise PageLockError(
                    f"'{name}' is mapped read-only, and this driver locks writable memory alone (device "
                    f"attribute {HOST_REGISTER_READ_ONLY_SUPPORTED} is 0)",
                    remedy="copy it into page-locked memory",
                )
        try:
            self._runtime.hostRegister(flat.ctypes.data, flat.nbytes, flags)
        except RuntimeError as error:
            raise PageLockError(
                f"the driver does not lock the {flat.nbytes} bytes of '{name}': {error}; `ulimit -l` is "
                f"{memlock_limit()}",
                remedy="`ulimit -l unlimited`, or LimitMEMLOCK=infinity in a service's unit; or free memory",
            ) from error
        return self._adopt(flat, array, "pinned", name)

    def host_pageable(self, array: NDArray[Any], name: str) -> Buffer:
        """Nothing is asked of the driver."""
        return self._adopt(flat_bytes(array), array, "pageable", name)

    def free(self, buffer: Buffer) -> None:
        """cudaFree, cudaFreeHost or cudaHostUnregister, whichever undoes the allocation."""
        buffer.require_whole()
        self._release(buffer.allocation)
        self._live.remove(buffer.allocation)

    # Streams and events

    def stream(self, name: str) -> Stream:
        """A non-blocking stream: it does not wait for the legacy default stream."""
        stream = Stream(name, self._call("streamCreateWithFlags", self._runtime.streamNonBlocking))
        self._streams.append(stream)
        return stream

    def event(self, timing: bool = False) -> Event:
        """Events without timing are cheaper to record and to wait for."""
        flags = self._runtime.eventDefault if timing else self._runtime.eventDisableTiming
        event = CudaEvent(timing, self._call("eventCreateWithFlags", flags))
        self._events.append(event)
        return event

    def record(self, event: Event, stream: Stream) -> None:
        """cudaEventRecord."""
        self._call("eventRecord", _handle(event), stream.handle)
        event.records += 1

    def wait(self, stream: Stream, event: Event) -> None:
        """cudaStreamWaitEvent."""
        event.require_recorded()
        self._call("streamWaitEvent", stream.handle, _handle(event))

    def sync(self, target: Stream | Event | None = None) -> None:
        """cudaDeviceSynchronize, cudaStreamSynchronize or cudaEventSynchronize."""
        if target is None:
            self._call("deviceSynchronize")
        elif isinstance(target, Event):
            target.require_recorded()
            self._call("eventSynchronize", _handle(target))
        else:
            self._call("streamSynchronize", target.handle)

    def query(self, target: Stream | Event) -> bool:
        """cupy returns the driver's status as it is; what is neither "done" nor "not yet" is an error."""
        if isinstance(target, Event):
            target.require_recorded()
            status = self._call("eventQuery", _handle(target))
        else:
            status = self._call("streamQuery", target.handle)
        if status not in (0, NOT_READY):
            raise DeviceError(
                f"earlier work on the GPU failed with cudaError {status}",
                remedy="run it with CUDA_LAUNCH_BLOCKING=1 to see which call fails",
            )
        return bool(status == 0)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """cudaEventElapsedTime; its resolution is about half a microsecond (CUDA runtime API reference)."""
        for event in (start, end):
            event.require_recorded()
            if not event.timing:
                raise EventError("an event without timing has no time", remedy="make it with timing=True")
            if not self.query(event):
                raise EventError("an event is not reached yet", remedy="sync on it first")
        return float(self._call("eventElapsedTime", _handle(start), _handle(end)))

    # Ops

    def copy(self, dst: Buffer, src: Buffer, stream: Stream, label: str = "") -> None:
        """cudaMemcpyAsync; with pageable memory the stream is waited for, so that its use ends here."""
        copy_direction(dst, src)
        self._memcpy(Copy(dst, src), stream)
        if "pageable" in (dst.kind, src.kind):
            self._call("streamSynchronize", stream.handle)

    def copy_batch(self, copies: Sequence[Copy], stream: Stream, label: str = "") -> None:
        """cuMemcpyBatchAsync where the driver has it, else one call per copy."""
        batch_direction(copies)
        if self._batch_copy is not None:
            self._batch_copy(copies, stream.handle)
            return
        for copy in copies:
            self._memcpy(copy, stream)

    def fill(self, dst: Buffer, value: int, stream: Stream) -> None:
        """cudaMemsetAsync."""
        dst.require_live()
        check_fill(dst, value)
        self._call("memsetAsync", dst.address, value, dst.nbytes, stream.handle)

    def launch(self, launch: Launch, stream: Stream) -> None:
        """The kernel enqueues itself; reads, writes and work are for the emulated device."""
        launch.kernel.run(launch, stream.handle)

    def capture(self, launches: Sequence[Launch], stream: Stream) -> Graph:
        """Stream capture of the launches, in cupy's default mode, "relaxed"."""
        self._call("streamBeginCapture", stream.handle)
        try:
            for launch in launches:
                launch.kernel.run(launch, stream.handle)
        finally:
            captured = self._call("streamEndCapture", stream.handle)
        graph = Graph(launches, self._call("graphInstantiate", captured))
        self._call("graphDestroy", captured)
        self._graphs.append(graph)
        return graph

    def replay(
        self, graph: Graph, stream: Stream, now: Callable[[], Sequence[Launch]], label: str = ""
    ) -> None:
        """cudaGraphLaunch."""
        self._call("graphLaunch", graph.handle, stream.handle)

    def free_graph(self, graph: Graph) -> None:
        """cudaGraphExecDestroy, which waits for nothing: what runs keeps what it needs."""
        self._call("graphExecDestroy", graph.handle)
        self._graphs.remove(graph)

    # The host's side

    def host_read(self, buffer: Buffer) -> Bytes:
        """A read-only view of the memory itself."""
        buffer.require_host()
        view = bytes_at(buffer.address, buffer.nbytes)
        view.flags.writeable = False
        return view

    def host_write(self, buffer: Buffer) -> Bytes:
        """A view of the memory itself."""
        buffer.require_host()
        buffer.require_writable()
        return bytes_at(buffer.address, buffer.nbytes)

    def host_copy(self, dst: Buffer, src: Buffer) -> None:
        """By the calling thread."""
        if dst.nbytes != src.nbytes or dst.overlaps(src):
            raise BoundsError(
                f"{src} cannot be copied to {dst}", remedy="give two disjoint ranges of one size"
            )
        np.copyto(self.host_write(dst), self.host_read(src))

    def host_work(self, seconds: Mapping[str, float], label: str = "") -> None:
        """Real work takes real time."""

    def now(self) -> float:
        """time.perf_counter."""
        return time.perf_counter()

    def close(self) -> None:
        """Wait, then destroy events and streams and give all memory back."""
        self._call("deviceSynchronize")
        for graph in self._graphs:
            self._call("graphExecDestroy", graph.handle)
        for event in self._events:
            self._call("eventDestroy", event.handle)
        for stream in self._streams:
            self._call("streamDestroy", stream.handle)
        for allocation in self._live:
            self._release(allocation)
        self._graphs, self._events, self._streams, self._live = [], [], [], []

    # Inside

    def _call(self, function: str, *arguments: int) -> Any:
        """cupy raises CUDARuntimeError, a RuntimeError, with the driver's words."""
        try:
            return getattr(self._runtime, function)(*arguments)
        except RuntimeError as error:
            raise DeviceError(
                f"CUDA's {function}{arguments}: {error}", remedy="see `strata doctor`"
            ) from error

    def _take(self, function: str, name: str, nbytes: int, *flags: int) -> int:
        try:
            return int(getattr(self._runtime, function)(nbytes, *flags))
        except RuntimeError as error:
            if getattr(error, "status", None) != OUT_OF_MEMORY:
                raise DeviceError(
                    f"CUDA's {function}({nbytes}): {error}", remedy="see `strata doctor`"
                ) from error
            raise CapacityError(
                f"'{name}' needs {nbytes} bytes, {self.free_bytes()} bytes of device memory are free",
                remedy="plan for less, or end other programs that use the GPU or page-locked memory",
            ) from error

    def _memcpy(self, copy: Copy, stream: Stream) -> None:
        dst, src = copy
        kind = self._runtime.memcpyDefault
        self._call("memcpyAsync", dst.address, src.address, dst.nbytes, kind, stream.handle)

    def _own(self, address: int, nbytes: int, kind: BufferKind, name: str) -> Buffer:
        allocation = Allocation(address, nbytes, kind, name)
        self._live.append(allocation)
        return allocation.whole()

    def _adopt(self, flat: Bytes, array: NDArray[Any], kind: BufferKind, name: str) -> Buffer:
        writable = bool(flat.flags.writeable)
        allocation = Allocation(flat.ctypes.data, flat.nbytes, kind, name, array=array, writable=writable)
        self._live.append(allocation)
        return allocation.whole()

    def _release(self, allocation: Allocation) -> None:
        allocation.freed = True
        if allocation.kind == "device":
            self._call("free", allocation.address)
        elif allocation.kind == "pinned":
            undo = "hostUnregister" if allocation.array is not None else "freeHost"
            self._call(undo, allocation.address)


def memlock_limit() -> str:
    """Of this process, in words. NVIDIA's module locks pages without counting them against it (so its
    published source), but a container's or another driver's rule may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"


def _cuda_runtime() -> Any:
    """cupy's runtime bindings, once a GPU is known to be there."""
    try:
        import cupy
    except ImportError as error:
        raise HardwareError(
            f"cupy cannot be imported: {error}", remedy="pip install 'strata-moe[gpu]'"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        raise HardwareError(
            f"no GPU can be used: {error}", remedy="install NVIDIA's driver, 525 or newer"
        ) from error
    if count == 0:
        raise HardwareError("the driver sees no GPU", remedy="check CUDA_VISIBLE_DEVICES and nvidia-smi")
    return runtime


def _handle(event: Event) -> int:
    if not isinstance(event, CudaEvent):
        raise DeviceError("the event is of another device", remedy="use device.event")
    return event.handle
