"""Memory of the emulated device: poisoned, guarded on both sides, or (sizes only) none at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.device.buffers import (
    Allocation,
    Buffer,
    BufferKind,
    Bytes,
    DeviceError,
    flat_bytes,
)
from strata.device.emulated_races import Shadow
from strata.errors import CapacityError

# A byte that is neither zero, nor a small number, nor a likely weight: f32 0xcdcdcdcd is -4.3e8.
POISON = 0xCD
GUARD = 0xA5
GUARD_BYTES = 256
DEVICE_ALIGNMENT = 256  # what cudaMalloc promises
HOST_ALIGNMENT = 4096  # a page
# Sizes-only memory lies at addresses that no process has: touching one ends the process at once.
NOWHERE = 0x4000_0000_0000_0000


class EmulatedAllocation(Allocation):
    """Backed by `memory` (None: sizes only); `guarded` has a red zone of GUARD_BYTES on each side."""

    __slots__ = ("guarded", "memory", "shadow")

    def __init__(
        self,
        address: int,
        nbytes: int,
        kind: BufferKind,
        name: str,
        *,
        memory: Bytes | None,
        guarded: Bytes | None = None,
        array: NDArray[Any] | None = None,
        writable: bool = True,
    ) -> None:
        super().__init__(address, nbytes, kind, name, array=array, writable=writable)
        self.memory = memory
        self.guarded = guarded
        self.shadow = Shadow(name)

    def poison(self) -> None:
        """Overwrite everything that this allocation owns; memory that was only registered stays."""
        if self.memory is not None and self.array is None:
            self.memory[:] = POISON

    def check_guards(self) -> None:
        """DeviceError when something wrote just outside."""
        if self.guarded is None:
            return
        start, end = GUARD_BYTES, GUARD_BYTES + self.nbytes
        for side, zone in (("before", self.guarded[:start]), ("after", self.guarded[end:])):
            if not (zone == GUARD).all():
                raise DeviceError(
                    f"something wrote {side} {self.kind} buffer '{self.name}' of {self.nbytes} bytes",
                    remedy="a kernel writes outside the ranges that its launch names",
                )


class Memory:
    """All allocations of one emulated device. with_data False: addresses and sizes, but no bytes."""

    def __init__(self, capacity: int, with_data: bool) -> None:
        self.capacity = capacity
        self.with_data = with_data
        self.used = 0
        self.peak = 0
        self._live: list[EmulatedAllocation] = []
        self._next_address = NOWHERE

    @property
    def live(self) -> list[EmulatedAllocation]:
        """Allocations that were not freed yet."""
        return list(self._live)

    def take(self, nbytes: int, kind: BufferKind, name: str) -> Buffer:
        """A new poisoned allocation; CapacityError when device memory does not suffice."""
        if nbytes <= 0:
            raise DeviceError(f"'{name}' asks for {nbytes} bytes", remedy="ask for at least one byte")
        if kind == "device":
            self._count(nbytes, name)
        alignment = DEVICE_ALIGNMENT if kind == "device" else HOST_ALIGNMENT
        allocation = self._backed(nbytes, kind, name, alignment) if self.with_data else None
        if allocation is None:
            address = self._nowhere(nbytes, alignment)
            allocation = EmulatedAllocation(address, nbytes, kind, name, memory=None)
        allocation.poison()
        self._live.append(allocation)
        return allocation.whole()

    def adopt(self, array: NDArray[Any], kind: BufferKind, name: str) -> Buffer:
        """Host memory that somebody else owns."""
        flat = flat_bytes(array)
        allocation = EmulatedAllocation(
            flat.ctypes.data,
            flat.nbytes,
            kind,
            name,
            memory=flat if self.with_data else None,
            array=array,
            writable=flat.flags.writeable,
        )
        self._live.append(allocation)
        return allocation.whole()

    def give_back(self, buffer: Buffer) -> None:
        """Poison and forget; the caller has checked that nothing uses it any more."""
        buffer.require_whole()
        allocation = own(buffer)
        allocation.check_guards()
        allocation.poison()
        allocation.freed = True
        self._live.remove(allocation)
        if allocation.kind == "device":
            self.used -= allocation.nbytes

    def check_integrity(self) -> None:
        """Guards are whole and the count of used bytes is that of the live allocations."""
        for allocation in self._live:
            allocation.check_guards()
        held = sum(a.nbytes for a in self._live if a.kind == "device")
        if held != self.used:
            raise AssertionError(f"{held} bytes of device memory are held, {self.used} are counted")

    def _count(self, nbytes: int, name: str) -> None:
        if self.used + nbytes > self.capacity:
            raise CapacityError(
                f"'{name}' needs {nbytes} bytes of device memory, "
                f"{self.capacity - self.used} of {self.capacity} are free",
                remedy="plan for less: fewer expert slots, KV pages or a shorter context",
            )
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def _backed(self, nbytes: int, kind: BufferKind, name: str, alignment: int) -> EmulatedAllocation:
        raw = np.empty(nbytes + 2 * GUARD_BYTES + alignment, np.uint8)
        start = -(raw.ctypes.data + GUARD_BYTES) % alignment
        guarded = raw[start : start + nbytes + 2 * GUARD_BYTES]
        guarded[:GUARD_BYTES] = guarded[GUARD_BYTES + nbytes :] = GUARD
        memory = guarded[GUARD_BYTES : GUARD_BYTES + nbytes]
        return EmulatedAllocation(memory.ctypes.data, nbytes, kind, name, memory=memory, guarded=guarded)

    def _nowhere(self, nbytes: int, alignment: int) -> int:
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + nbytes
        return address


def own(buffer: Buffer) -> EmulatedAllocation:
    """The allocation as this device made it; DeviceError for a buffer of another device."""
    allocation = buffer.allocation
    if not isinstance(allocation, EmulatedAllocation):
        raise DeviceError(f"{buffer} belongs to another device", remedy="use buffers of this device")
    return allocation


def bytes_of(buffer: Buffer) -> Bytes:
    """The bytes behind a buffer; only for devices that have data."""
    memory = own(buffer).memory
    if memory is None:
        raise DeviceError(f"{buffer} has a size but no data", remedy="make the device with data")
    return memory[buffer.offset : buffer.offset + buffer.nbytes]
