"""Memory of the emulated device: poison, guards, bounds, kinds, ownership."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from device_figures import ROUND

from strata.device.base import (
    BoundsError,
    Buffer,
    BufferKindError,
    Copy,
    DeviceError,
    FreedBufferError,
    Launch,
)
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_memory import POISON
from strata.device.python_kernel import PythonKernel
from strata.errors import CapacityError

NOTHING = PythonKernel("nothing", lambda reads, writes: None)


def test_new_memory_is_poisoned_and_freed_memory_again() -> None:
    device = EmulatedDevice(ROUND)
    stream = device.stream("s")
    pinned, slots = device.host_alloc(64, "pinned"), device.alloc(64, "slots")
    assert (device.host_read(pinned) == POISON).all()
    device.copy(pinned, slots, stream)
    device.sync()
    assert (device.host_read(pinned) == POISON).all()
    view = device.host_write(pinned)
    view[:] = 1
    device.free(pinned)
    assert (view == POISON).all()


def test_memory_that_was_only_registered_stays_as_it_is() -> None:
    device = EmulatedDevice(ROUND)
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    buffer = device.host_register(array, "arena")
    assert (buffer.nbytes, buffer.kind, buffer.address) == (32, "pinned", array.ctypes.data)
    device.free(buffer)
    device.close()
    assert array.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_addresses_are_aligned_as_the_driver_aligns_them() -> None:
    for with_data in (True, False):
        device = EmulatedDevice(ROUND, with_data=with_data)
        device_buffers = [device.alloc(n, "x") for n in (1, 300, 17)]
        host_buffers = [device.host_alloc(n, "x") for n in (1, 5000, 17)]
        assert all(buffer.address % 256 == 0 for buffer in device_buffers)
        assert all(buffer.address % 4096 == 0 for buffer in host_buffers)
        spans = sorted((b.address, b.address + b.nbytes) for b in device_buffers + host_buffers)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_device_memory_is_counted() -> None:
    device = EmulatedDevice(ROUND)
    first = device.alloc(1 << 19, "weights")
    with pytest.raises(CapacityError, match="'slots' needs 524289 bytes of device memory, 524288 of 1048576"):
        device.alloc((1 << 19) + 1, "slots")
    second = device.alloc(1 << 19, "slots")
    assert device.free_bytes() == 0
    device.free(first)
    assert device.free_bytes() == 1 << 19
    device.free(second)
    assert device.memory.peak == 1 << 20
    with pytest.raises(DeviceError, match="asks for 0 bytes"):
        device.alloc(0, "nothing")


def uses_of(device: EmulatedDevice, buffer: Buffer, other: Buffer) -> dict:
    stream = device.stream("s")
    return {
        "copy from": lambda: device.copy(other, buffer, stream),
        "copy to": lambda: device.copy(buffer, other, stream),
        "batch": lambda: device.copy_batch([Copy(buffer, other)], stream),
        "read": lambda: device.launch(Launch(NOTHING, reads=(buffer,)), stream),
        "write": lambda: device.launch(Launch(NOTHING, writes=(buffer,)), stream),
        "fill": lambda: device.fill(buffer, 0, stream),
        "free": lambda: device.free(buffer),
    }


@pytest.mark.parametrize("use", ["copy from", "copy to", "batch", "read", "write", "fill", "free"])
def test_freed_device_memory_is_not_used(use: str) -> None:
    device = EmulatedDevice(ROUND)
    buffer, other = device.alloc(16, "slots"), device.host_alloc(16, "host")
    device.free(buffer)
    with pytest.raises(FreedBufferError, match=r"device buffer 'slots'\[0:16\)"):
        uses_of(device, buffer, other)[use]()


@pytest.mark.parametrize("call", ["host_read", "host_write"])
def test_the_host_uses_live_host_memory_only(call: str) -> None:
    device = EmulatedDevice(ROUND)
    pinned = device.host_alloc(16, "pinned")
    with pytest.raises(BufferKindError, match="the host cannot read or write device buffer 'slots'"):
        getattr(device, call)(device.alloc(16, "slots"))
    device.free(pinned)
    with pytest.raises(FreedBufferError):
        getattr(device, call)(pinned)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 0), (0, 17), (16, 1), (5, -2)])
def test_slices_stay_inside(offset: int, nbytes: int) -> None:
    buffer = EmulatedDevice(ROUND).alloc(32, "slots").slice(8, 16)
    with pytest.raises(BoundsError, match="which has 16 bytes"):
        buffer.slice(offset, nbytes)


def test_a_slice_of_a_slice_is_a_range_of_the_allocation() -> None:
    buffer = EmulatedDevice(ROUND).alloc(32, "slots")
    inner = buffer.slice(8, 16).slice(4, 2)
    assert (inner.offset, inner.end, inner.address) == (12, 14, buffer.address + 12)
    assert inner.overlaps(buffer.slice(13, 1))
    assert not inner.overlaps(buffer.slice(14, 1))
    assert not inner.overlaps(buffer.slice(0, 12))


def test_wrong_copies_are_refused() -> None:
    device = EmulatedDevice(ROUND)
    stream = device.stream("s")
    slots, pinned = device.alloc(32, "slots"), device.host_alloc(32, "pinned")
    constant = np.zeros(32, np.uint8)
    constant.flags.writeable = False
    mapped = device.host_register(constant, "mapped")
    cases = [
        (slots, pinned.slice(0, 16), BoundsError, "16 bytes of .* do not fit"),
        (slots.slice(0, 16), slots.slice(8, 16), BoundsError, "overlap"),
        (pinned, mapped, BufferKindError, "both host memory"),
        (mapped, slots, BufferKindError, "read-only"),
    ]
    for dst, src, error, text in cases:
        with pytest.raises(error, match=text):
            device.copy(dst, src, stream)
    device.copy(slots, mapped, stream)
    with pytest.raises(BufferKindError, match="read-only"):
        device.host_write(mapped)


def test_wrong_batches_are_refused() -> None:
    device = EmulatedDevice(ROUND)
    stream = device.stream("s")
    slots, pinned = device.alloc(32, "slots"), device.host_alloc(32, "pinned")
    plain = device.host_pageable(np.zeros(32, np.uint8), "plain")
    low, high = (0, 16), (16, 16)
    cases = [
        ([], BufferKindError),
        ([Copy(slots.slice(*low), pinned.slice(*low)), Copy(pinned.slice(*high), slots.slice(*high))], None),
        ([Copy(slots.slice(*low), slots.slice(*high))], None),
        ([Copy(slots, plain)], None),
    ]
    for copies, _ in cases:
        with pytest.raises(BufferKindError, match="a batch of"):
            device.copy_batch(copies, stream)
    twice = [Copy(slots.slice(0, 16), pinned.slice(*low)), Copy(slots.slice(15, 16), pinned.slice(*high))]
    with pytest.raises(BoundsError, match="which overlap"):
        device.copy_batch(twice, stream)
    shared_source = [
        Copy(slots.slice(*low), pinned.slice(*low)),
        Copy(slots.slice(*high), pinned.slice(*low)),
    ]
    device.copy_batch(shared_source, stream)


def test_kernels_see_the_ranges_of_their_launch_only() -> None:
    device = EmulatedDevice(ROUND)
    stream, memory = device.stream("s"), device.alloc(32, "x")

    def double(reads, writes):  # type: ignore[no-untyped-def]
        assert [len(a) for a in reads] == [8]
        assert not reads[0].flags.writeable
        writes[0][:] = reads[0] * 2

    device.fill(memory, 3, stream)
    launch = Launch(PythonKernel("double", double), (memory.slice(0, 8),), (memory.slice(8, 8),))
    device.launch(launch, stream)
    out = device.host_alloc(32, "out")
    device.copy(out, memory, stream)
    device.sync()
    assert device.host_read(out).tolist() == [3] * 8 + [6] * 8 + [3] * 16
    plain = device.host_pageable(np.zeros(4, np.uint8), "plain")
    with pytest.raises(BufferKindError, match="double is given pageable buffer"):
        device.launch(Launch(PythonKernel("double", double), reads=(plain,)), stream)


@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), (40, "after")])
def test_writes_beside_an_allocation_are_found(offset: int, side: str) -> None:
    device = EmulatedDevice(ROUND)
    slots = device.alloc(40, "slots")
    device.check_integrity()
    ctypes.memset(slots.address + offset, 0, 1)
    with pytest.raises(DeviceError, match=f"something wrote {side} device buffer 'slots' of 40 bytes"):
        device.check_integrity()
    with pytest.raises(DeviceError, match="something wrote"):
        device.close()


def test_closing_runs_what_is_pending_frees_all_and_may_be_repeated() -> None:
    ran: list[int] = []
    device = EmulatedDevice(ROUND, seed=4)
    stream, slots = device.stream("s"), device.alloc(16, "slots")
    device.launch(Launch(PythonKernel("k", lambda reads, writes: ran.append(1)), writes=(slots,)), stream)
    device.close()
    device.close()
    assert ran == [1]
    assert device.free_bytes() == ROUND.memory_bytes
    with pytest.raises(FreedBufferError):
        slots.require_live()
    with pytest.raises(DeviceError, match="is closed"):
        device.launch(Launch(NOTHING), stream)


def test_only_whole_allocations_are_freed() -> None:
    device = EmulatedDevice(ROUND)
    buffer = device.alloc(16, "slots")
    with pytest.raises(BufferKindError, match="8 of its allocation's 16 bytes"):
        device.free(buffer.slice(0, 8))


def test_a_fill_is_a_byte_of_device_memory() -> None:
    device = EmulatedDevice(ROUND)
    stream = device.stream("s")
    with pytest.raises(DeviceError, match="256 is not the value of a byte"):
        device.fill(device.alloc(16, "x"), 256, stream)
    with pytest.raises(BufferKindError, match="fill of pinned"):
        device.fill(device.host_alloc(16, "x"), 0, stream)


def test_sizes_only_memory_can_be_larger_than_the_machine() -> None:
    from dataclasses import replace

    device = EmulatedDevice(replace(ROUND, memory_bytes=1 << 45), with_data=False)
    stream = device.stream("s")
    slots, host = device.alloc(1 << 44, "slots"), device.host_alloc(1 << 44, "host")
    device.copy(slots, host, stream)
    ran: list[int] = []
    device.launch(Launch(PythonKernel("k", lambda reads, writes: ran.append(1)), reads=(slots,)), stream)
    device.sync()
    assert ran == []
    assert device.now() > 1000
    with pytest.raises(DeviceError, match="has a size but no data"):
        device.host_read(host)
    device.close()


def test_buffers_streams_and_events_of_another_device_are_refused() -> None:
    device = EmulatedDevice(ROUND)
    from strata.device.base import Allocation, Event, Stream

    stream, slots = device.stream("s"), device.alloc(16, "slots")
    foreign = Allocation(4096, 16, "pinned", "foreign").whole()
    for call in (
        lambda: device.copy(slots, foreign, stream),
        lambda: device.record(Event(False), stream),
        lambda: device.wait(Stream("other"), device.event()),
    ):
        with pytest.raises(DeviceError, match="another device"):
            call()


def test_arrays_that_are_not_one_piece_cannot_be_registered() -> None:
    device = EmulatedDevice(ROUND)
    for array in (np.zeros((4, 4))[:, ::2], np.zeros(0)):
        with pytest.raises(BufferKindError, match="not one piece of memory"):
            device.host_register(array, "x")
