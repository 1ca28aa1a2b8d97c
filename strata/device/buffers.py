"""Buffers: ranges of bytes on the device or on the host, and the errors of those who misuse them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strata.errors import StrataError

Bytes = NDArray[np.uint8]
BufferKind = Literal["device", "pinned", "pageable"]


class DeviceError(StrataError):
    """The device refused a call, or the call itself is wrong."""


class BoundsError(DeviceError):
    """A range leaves its buffer, or the two sides of a copy differ in size."""


class FreedBufferError(DeviceError):
    """A buffer is used, or freed again, after its allocation was freed."""


class BufferKindError(DeviceError):
    """The host touches device memory, a batch has pageable memory, read-only memory is written, ..."""


class PageLockError(DeviceError):
    """Host memory cannot be page-locked; it can be used as plain memory all the same."""


class EventError(DeviceError):
    """An event is waited for before it was recorded, or asked for a time that it does not have."""


class StaleGraphError(DeviceError):
    """A graph is replayed although its launches are no longer what would be launched; found by the emulated
    device only."""


class RaceError(DeviceError):
    """Two accesses to the same bytes that nothing orders; found by the emulated device only."""


class Allocation:
    """Memory taken from the device or the host in one piece.

    It belongs to whoever called alloc, host_alloc or host_register, until that one calls free or the
    device is closed. Memory that was registered stays the property of its array: `array` keeps it alive.
    """

    __slots__ = ("address", "array", "freed", "kind", "name", "nbytes", "writable")

    def __init__(
        self,
        address: int,
        nbytes: int,
        kind: BufferKind,
        name: str,
        *,
        array: NDArray[Any] | None = None,
        writable: bool = True,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.kind = kind
        self.name = name
        self.array = array
        self.writable = writable
        self.freed = False

    def whole(self) -> Buffer:
        """The buffer that covers all of it."""
        return Buffer(self, 0, self.nbytes)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes `[offset, offset + nbytes)` of an allocation: a view that owns nothing."""

    allocation: Allocation
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where the first byte lies, in the address space of its kind."""
        return self.allocation.address + self.offset

    @property
    def kind(self) -> BufferKind:
        """Device memory, page-locked host memory, or plain host memory."""
        return self.allocation.kind

    @property
    def end(self) -> int:
        """Offset of the byte after the last."""
        return self.offset + self.nbytes

    def slice(self, offset: int, nbytes: int) -> Buffer:
        """Bytes `[offset, offset + nbytes)` of this buffer; BoundsError when they are not all inside."""
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise BoundsError(
                f"bytes [{offset}, {offset + nbytes}) are not inside {self}, which has {self.nbytes} bytes",
                remedy="a slice has at least one byte and ends inside its buffer",
            )
        return Buffer(self.allocation, self.offset + offset, nbytes)

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share a byte."""
        same = self.allocation is other.allocation
        return same and self.offset < other.end and other.offset < self.end

    def require_live(self) -> None:
        """FreedBufferError when the allocation was freed."""
        if self.allocation.freed:
            raise FreedBufferError(f"{self} is used after it was freed", remedy="free it after its last use")

    def require_whole(self) -> None:
        """What may be freed: FreedBufferError for the second time, BufferKindError for a part."""
        if self.allocation.freed:
            raise FreedBufferError(f"{self} is freed twice", remedy="free each allocation once")
        if self.nbytes != self.allocation.nbytes:
            raise BufferKindError(
                f"{self} has {self.nbytes} of its allocation's {self.allocation.nbytes} bytes",
                remedy="free the buffer that alloc returned",
            )

    def require_host(self) -> None:
        """FreedBufferError or BufferKindError when the host may not look at these bytes."""
        self.require_live()
        if self.allocation.kind == "device":
            raise BufferKindError(f"the host cannot read or write {self}", remedy="copy it to the host")

    def require_writable(self) -> None:
        """BufferKindError when the memory is read-only (a mapped file, for example)."""
        if not self.allocation.writable:
            raise BufferKindError(f"{self} is read-only memory", remedy="write to a buffer of its own")

    def __str__(self) -> str:
        return f"{self.kind} buffer '{self.allocation.name}'[{self.offset}:{self.end})"


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Host memory at an address as an array u8 [nbytes]; the caller keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def flat_bytes(array: NDArray[Any]) -> Bytes:
    """The same memory as u8 [array.nbytes]; BufferKindError unless it is one contiguous piece."""
    if not array.flags.c_contiguous or array.nbytes == 0:
        raise BufferKindError(
            f"an array of shape {array.shape} and strides {array.strides} is not one piece of memory",
            remedy="give a contiguous array with at least one byte",
        )
    return array.reshape(-1).view(np.uint8)
