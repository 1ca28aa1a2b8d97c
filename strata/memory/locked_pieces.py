"""Host memory that transfers read again and again: page-locked piece by piece, as it turns out to be.

A copy from page-locked memory runs at the bus's speed beside everything else; one from plain memory must be
copied by the host into a staging buffer first, which takes a core about as long as the bus takes. Locking a
piece takes longer than staging it once (about 2.5 GB/s against 5 to 10), so it is done from a piece's second
copy on, and nothing is locked at the start.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.config.units import format_size
from strata.device.base import Buffer, Device
from strata.device.buffers import PageLockError
from strata.errors import CapacityError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class LockOptions:
    """after: copies of a piece as plain memory before it is locked, None: never is. copies: bytes of
    page-locked memory that pieces may be copied into which cannot be locked where they lie."""

    after: int | None = 0
    copies: int = 0


def locked_if_possible(device: Device, memory: Bytes, name: str) -> Buffer:
    """All of an arena, page-locked; else as plain memory, and a warning that says why."""
    try:
        return device.host_register(memory, name)
    except PageLockError as error:
        warnings.warn(
            f"the {name} ({format_size(memory.nbytes)}) cannot be page-locked: {error.cause}. What moves "
            f"there and back crosses the bus through two staging buffers; remedy: {error.remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
        return device.host_pageable(memory, name)


@dataclass
class _Piece:
    plain: Buffer | None
    reads: int = 0
    locked: Buffer | None = None


class LockedPieces:
    """Buffers over pieces of host memory, which must not overlap and stay where they are until `close`.

    locked: bytes page-locked where they lie; copied: bytes of copies in page-locked memory.
    """

    def __init__(self, device: Device, options: LockOptions) -> None:
        self._device = device
        self._options = options
        self._pieces: dict[int, _Piece] = {}
        self._refused: dict[bool, PageLockError] = {}  # of what is writable, and of what is not
        self._told = False
        self.locked = self.copied = 0

    def buffer(self, piece: Bytes, name: str, *, changes: bool = False) -> Buffer:
        """For one more transfer that reads of a piece. changes: its bytes do: no copy can stand for it."""
        found = self._pieces.setdefault(piece.ctypes.data, _Piece(None))
        after = self._options.after
        if found.locked is None and after is not None and found.reads >= after:
            found.locked = self._lock(piece, name, changes)
        found.reads += 1
        if found.locked is not None:
            return found.locked
        if found.plain is None:
            found.plain = self._device.host_pageable(piece, name)
        return found.plain

    def close(self) -> None:
        """Unlock everything. No transfer reads any of it any more."""
        for piece in self._pieces.values():
            for buffer in (piece.plain, piece.locked):
                if buffer is not None:
                    self._device.free(buffer)
        self._pieces.clear()
        self.locked = self.copied = 0

    def _lock(self, piece: Bytes, name: str, changes: bool) -> Buffer | None:
        writable = bool(piece.flags.writeable)
        if writable not in self._refused:
            try:
                buffer = self._device.host_register(piece, name)
            except PageLockError as error:
                self._refused[writable] = error.with_traceback(None)  # whose frames hold the engine
            else:
                self.locked += piece.nbytes
                return buffer
        refusal = self._refused[writable]
        if changes:
            self._tell(refusal, "copies would grow stale")
            return None
        return self._copy(piece, name, refusal)

    def _copy(self, piece: Bytes, name: str, refusal: PageLockError) -> Buffer | None:
        if self.copied + piece.nbytes > self._options.copies:
            self._tell(refusal, f"copies may have {format_size(self._options.copies)}")
            return None
        try:
            buffer = self._device.host_alloc(piece.nbytes, name)
        except CapacityError as error:
            self._tell(refusal, error.cause)
            return None
        self._device.host_write(buffer)[:] = piece
        self.copied += piece.nbytes
        return buffer

    def _tell(self, refusal: PageLockError, of_copies: str) -> None:
        """Once: there will be hundreds."""
        if self._told:
            return
        self._told = True
        held = format_size(self.locked + self.copied)
        warnings.warn(
            f"{held} of experts are page-locked and no more will be: {refusal.cause}, and {of_copies}. The "
            "others cross the bus through two staging buffers, which costs a core's time beside the bus's; "
            f"remedy: {refusal.remedy}, or give Strata more host memory: host.memory",
            RuntimeWarning,
            stacklevel=5,
        )
