"""What CudaDevice hands to cupy and the driver, as a fake records it: nothing here has met a GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.device import cuda_batch
from strata.device.base import (
    BoundsError,
    BufferKindError,
    Copy,
    Device,
    DeviceError,
    EventError,
    FreedBufferError,
    Launch,
)
from strata.device.buffers import PageLockError
from strata.device.cuda import CudaDevice
from strata.errors import CapacityError, HardwareError


class FakeCudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeRuntime:
    """cupy.cuda.runtime: host memory plays device memory; calls are listed."""

    memcpyDefault, hostAllocPortable, streamNonBlocking = 4, 1, 1  # noqa: N815
    eventDefault, eventDisableTiming = 0, 2  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.memory: list[Any] = []
        self.query_status = 0
        self.fails: dict[str, int] = {}
        self.devices = 1
        self.attribute = 1

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: int) -> Any:
            self.calls.append((name, *arguments))
            if name in self.fails:
                raise FakeCudaError(self.fails[name])
            if name in ("malloc", "hostAlloc"):
                self.memory.append(ctypes.create_string_buffer(arguments[0]))
                return ctypes.addressof(self.memory[-1])
            if name in ("streamCreateWithFlags", "eventCreateWithFlags"):
                return 1000 + len(self.calls)
            answers = {
                "streamEndCapture": 71,
                "graphInstantiate": 72,
                "getDeviceCount": self.devices,
                "deviceGetAttribute": self.attribute,
                "memGetInfo": (700, 900),
                "eventQuery": self.query_status,
                "streamQuery": self.query_status,
                "eventElapsedTime": 1.5,
            }
            return answers.get(name)

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=fake)))
    monkeypatch.setattr("strata.device.cuda.load_driver", lambda: None)
    return fake


@pytest.fixture
def device(runtime: FakeRuntime) -> CudaDevice:
    device = CudaDevice(2)
    assert runtime.calls == [("getDeviceCount",), ("setDevice", 2)]
    runtime.calls.clear()
    return device


def test_it_has_the_protocol(device: CudaDevice) -> None:
    as_protocol: Device = device
    assert as_protocol.name == "cuda"


def test_memory_is_taken_and_given_back_by_its_kind(device: CudaDevice, runtime: FakeRuntime) -> None:
    array = np.zeros(64, np.uint8)
    constant = np.zeros(64, np.uint8)
    constant.flags.writeable = False
    buffers = [
        device.alloc(64, "slots"),
        device.host_alloc(64, "staging"),
        device.host_register(array, "arena"),
        device.host_register(constant, "mapped"),
        device.host_pageable(array, "plain"),
    ]
    assert runtime.calls == [
        ("malloc", 64),
        ("hostAlloc", 64, 1),
        ("hostRegister", array.ctypes.data, 64, 1),
        ("deviceGetAttribute", 113, 2),
        ("hostRegister", constant.ctypes.data, 64, 1 | 8),
    ]
    runtime.calls.clear()
    addresses = [buffer.address for buffer in buffers]
    device.free(buffers[0])
    with pytest.raises(FreedBufferError, match="freed twice"):
        device.free(buffers[0])
    with pytest.raises(BufferKindError, match="32 of its allocation's 64"):
        device.free(buffers[1].slice(0, 32))
    device.close()
    device.close()
    assert [call for call in runtime.calls if call[0] != "deviceSynchronize"] == [
        ("free", addresses[0]),
        ("freeHost", addresses[1]),
        ("hostUnregister", addresses[2]),
        ("hostUnregister", addresses[3]),
    ]


def test_what_the_driver_does_not_lock_stays_plain_memory(device: CudaDevice, runtime: FakeRuntime) -> None:
    constant, array = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    constant.flags.writeable = False
    runtime.attribute = 0
    with pytest.raises(PageLockError, match=r"mapped read-only.*attribute 113 is 0"):
        device.host_register(constant, "mapped")
    assert runtime.calls == [("deviceGetAttribute", 113, 2)]
    runtime.fails["hostRegister"] = 2
    with pytest.raises(PageLockError, match=r"(?s)the 64 bytes of 'arena'.*`ulimit -l` is .*LimitMEMLOCK"):
        device.host_register(array, "arena")
    runtime.calls.clear()
    device.close()
    assert runtime.calls == [("deviceSynchronize",)]


def test_streams_events_and_their_order(device: CudaDevice, runtime: FakeRuntime) -> None:
    stream, plain, timed = device.stream("s"), device.event(), device.event(timing=True)
    assert [call[:2] for call in runtime.calls] == [
        ("streamCreateWithFlags", 1),
        ("eventCreateWithFlags", 2),
        ("eventCreateWithFlags", 0),
    ]
    for call in (lambda: device.wait(stream, plain), lambda: device.sync(plain), lambda: device.query(plain)):
        with pytest.raises(EventError, match="before it was recorded"):
            call()
    runtime.calls.clear()
    for event in (plain, timed):
        device.record(event, stream)
    device.wait(stream, plain)
    device.sync(plain)
    device.sync(stream)
    device.sync()
    s, e, t = stream.handle, plain.handle, timed.handle  # type: ignore[attr-defined]
    assert runtime.calls == [
        ("eventRecord", e, s),
        ("eventRecord", t, s),
        ("streamWaitEvent", s, e),
        ("eventSynchronize", e),
        ("streamSynchronize", s),
        ("deviceSynchronize",),
    ]
    assert device.elapsed_ms(timed, timed) == 1.5
    with pytest.raises(EventError, match="without timing"):
        device.elapsed_ms(timed, plain)
    runtime.calls.clear()
    device.close()
    assert runtime.calls == [
        ("deviceSynchronize",),
        ("eventDestroy", e),
        ("eventDestroy", t),
        ("streamDestroy", s),
    ]


def test_a_query_tells_done_from_not_yet_and_from_failed(device: CudaDevice, runtime: FakeRuntime) -> None:
    stream, event = device.stream("s"), device.event(timing=True)
    device.record(event, stream)
    for target in (stream, event):
        runtime.query_status = 0
        assert device.query(target)
        runtime.query_status = 600
        assert not device.query(target)
        runtime.query_status = 719
        with pytest.raises(DeviceError, match="cudaError 719"):
            device.query(target)
    runtime.query_status = 600
    with pytest.raises(EventError, match="not reached yet"):
        device.elapsed_ms(event, event)


def test_copies_and_fills(device: CudaDevice, runtime: FakeRuntime) -> None:
    stream, slots, host = device.stream("s"), device.alloc(64, "slots"), device.host_alloc(64, "host")
    plain = device.host_pageable(np.zeros(64, np.uint8), "plain")
    runtime.calls.clear()
    device.copy(slots.slice(16, 8), host.slice(0, 8), stream)
    device.copy(slots, plain, stream)
    device.fill(slots.slice(4, 4), 205, stream)
    s = stream.handle
    assert runtime.calls == [
        ("memcpyAsync", slots.address + 16, host.address, 8, 4, s),
        ("memcpyAsync", slots.address, plain.address, 64, 4, s),
        ("streamSynchronize", s),
        ("memsetAsync", slots.address + 4, 205, 4, s),
    ]
    with pytest.raises(BoundsError):
        device.copy(slots, host.slice(0, 8), stream)
    with pytest.raises(BufferKindError):
        device.fill(host, 0, stream)
    with pytest.raises(DeviceError, match="256"):
        device.fill(slots, 256, stream)


def test_a_batch_is_a_loop_where_the_driver_is_old(device: CudaDevice, runtime: FakeRuntime) -> None:
    stream, slots, host = device.stream("s"), device.alloc(64, "slots"), device.host_alloc(64, "host")
    runtime.calls.clear()
    copies = [Copy(slots.slice(i * 8, 8), host.slice(i * 16, 8)) for i in range(3)]
    device.copy_batch(copies, stream)
    assert runtime.calls == [
        ("memcpyAsync", c.dst.address, c.src.address, 8, 4, stream.handle) for c in copies
    ]
    with pytest.raises(BufferKindError):
        device.copy_batch([], stream)


class FakeDriver:
    """libcuda with cuMemcpyBatchAsync behind cuGetProcAddress_v2, called through real ctypes marshalling."""

    def __init__(self, status: int = 0, lookup_status: int = 0, failed: int | None = None) -> None:
        self.seen: list[Any] = []
        self.lookups: list[tuple[bytes, int]] = []
        self.lookup_status = lookup_status

        def batch(dsts, srcs, sizes, count, attributes, indices, kinds, failed_at, stream) -> int:  # type: ignore[no-untyped-def]
            u64, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
            self.seen.append(
                {
                    "dsts": ctypes.cast(dsts, u64)[:count],
                    "srcs": ctypes.cast(srcs, u64)[:count],
                    "sizes": ctypes.cast(sizes, size)[:count],
                    "attributes": ctypes.string_at(attributes, 24),
                    "indices": ctypes.cast(indices, size)[:kinds],
                    "stream": stream,
                }
            )
            if failed is not None:
                ctypes.cast(failed_at, size)[0] = failed
            return status

        self.function = cuda_batch._prototype()(batch)

    def cuGetProcAddress_v2(self, name, address, version, flags, status) -> int:  # type: ignore[no-untyped-def]  # noqa: N802
        self.lookups.append((name, version))
        if self.lookup_status == 0:
            address._obj.value = ctypes.cast(self.function, ctypes.c_void_p).value
        return self.lookup_status


def test_a_batch_is_one_call_where_the_driver_has_it(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("strata.device.cuda.load_driver", lambda: driver)
    device = CudaDevice()
    stream, slots, host = device.stream("s"), device.alloc(64, "slots"), device.host_alloc(64, "host")
    runtime.calls.clear()
    copies = [Copy(slots.slice(i * 16, 8 + i), host.slice(i * 20, 8 + i)) for i in range(3)]
    device.copy_batch(copies, stream)
    assert driver.lookups == [(b"cuMemcpyBatchAsync", 12080)]
    assert runtime.calls == []
    [seen] = driver.seen
    words = np.frombuffer(seen.pop("attributes"), np.int32).tolist()
    assert words == [1, 0, 0, 0, 0, 1], "stream order, two empty location hints, prefer overlap"
    assert seen == {
        "dsts": [copy.dst.address for copy in copies],
        "srcs": [copy.src.address for copy in copies],
        "sizes": [8, 9, 10],
        "indices": [0],
        "stream": stream.handle,
    }


def test_a_failed_batch_says_which_copy(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    for failed, text in ((1, "failed at copy 1 with CUresult 700"), (None, "failed with CUresult 700")):
        driver = FakeDriver(status=700, failed=failed)
        monkeypatch.setattr("strata.device.cuda.load_driver", lambda driver=driver: driver)
        device = CudaDevice()
        stream, slots, host = device.stream("s"), device.alloc(64, "slots"), device.host_alloc(64, "host")
        with pytest.raises(DeviceError, match=text):
            device.copy_batch([Copy(slots, host)], stream)


def test_drivers_without_the_function() -> None:
    assert cuda_batch.find_batch_copy(None) is None
    assert cuda_batch.find_batch_copy(SimpleNamespace()) is None
    assert cuda_batch.find_batch_copy(FakeDriver(lookup_status=500)) is None


def test_a_kernel_gets_its_launch_and_the_raw_stream(device: CudaDevice) -> None:
    seen = []
    kernel = SimpleNamespace(name="k", run=lambda launch, stream: seen.append((launch, stream)))
    launch, stream = Launch(kernel, grid=(3, 1, 1)), device.stream("s")
    device.launch(launch, stream)
    assert seen == [(launch, stream.handle)]


def test_a_graph_is_captured_once_and_launched(device: CudaDevice, runtime: FakeRuntime) -> None:
    seen = []
    kernel = SimpleNamespace(name="k", run=lambda launch, stream: runtime.calls.append(("k", stream)))
    stream = device.stream("s")
    runtime.calls.clear()
    graph = device.capture([Launch(kernel), Launch(kernel)], stream)
    device.replay(graph, stream, lambda: seen.append("asked") or [])  # type: ignore[func-returns-value]
    device.free_graph(graph)
    kept = device.capture([], stream)
    device.close()
    handle = stream.handle
    begun, ended = ("streamBeginCapture", handle), ("streamEndCapture", handle)
    made = [("graphInstantiate", 71), ("graphDestroy", 71)]
    expected = [begun, ("k", handle), ("k", handle), ended, *made, ("graphLaunch", 72, handle)]
    freed = ("graphExecDestroy", 72)
    expected += [freed, begun, ended, *made, ("deviceSynchronize",), freed]
    assert runtime.calls[: len(expected)] == expected and not seen
    assert (len(graph.launches), len(kept.launches)) == (2, 0)


def test_a_capture_that_fails_ends(device: CudaDevice, runtime: FakeRuntime) -> None:
    def fails(launch: Launch, stream: int) -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        device.capture([Launch(SimpleNamespace(name="k", run=fails))], device.stream("s"))
    assert runtime.calls[-1][0] == "streamEndCapture"


def test_the_host_sees_the_memory_itself(device: CudaDevice) -> None:
    first, second = device.host_alloc(16, "a"), device.host_alloc(16, "b")
    device.host_write(first)[:] = np.arange(16)
    device.host_copy(second.slice(8, 8), first.slice(0, 8))
    view = device.host_read(second)
    assert view[8:].tolist() == list(range(8))
    assert not view.flags.writeable
    with pytest.raises(BufferKindError):
        device.host_read(device.alloc(8, "slots"))
    with pytest.raises(BoundsError):
        device.host_copy(second, first.slice(0, 8))
    before = device.now()
    device.host_work({"host": 100.0})
    assert device.now() - before < 50.0


def test_no_memory_is_told_with_both_numbers(device: CudaDevice, runtime: FakeRuntime) -> None:
    runtime.fails["malloc"] = 2
    with pytest.raises(CapacityError, match="'slots' needs 4096 bytes, 700 bytes of device memory are free"):
        device.alloc(4096, "slots")
    runtime.fails["malloc"] = 46
    with pytest.raises(DeviceError, match="cudaError 46"):
        device.alloc(4096, "slots")


def test_errors_of_the_runtime_name_the_call(device: CudaDevice, runtime: FakeRuntime) -> None:
    runtime.fails["deviceSynchronize"] = 700
    with pytest.raises(DeviceError, match=r"CUDA's deviceSynchronize\(\): cudaError 700"):
        device.sync()


def test_machines_without_cupy_driver_or_gpu(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    runtime.devices = 0
    with pytest.raises(HardwareError, match="sees no GPU"):
        CudaDevice()
    runtime.fails["getDeviceCount"] = 35
    with pytest.raises(HardwareError, match="no GPU can be used: cudaError 35"):
        CudaDevice()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(HardwareError, match="cupy cannot be imported"):
        CudaDevice()
