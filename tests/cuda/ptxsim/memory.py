"""Global buffers and shared memory of one block: bounds, alignment, read-only, uninitialised, cp.async."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptxsim.parse import Instruction, PtxError
from ptxsim.profile import Profile
from ptxsim.values import U8, UNSIGNED

ARGUMENT_SHIFT = 32
"""Addresses are (argument + 1) << 32 plus the offset."""


@dataclass
class GlobalMemory:
    """data: u8, padded to 16 bytes; nbytes: without the padding."""

    data: np.ndarray
    nbytes: int
    writable: bool


@dataclass
class PendingCopy:
    """A cp.async under way: where to, what, which threads."""

    addresses: np.ndarray
    values: np.ndarray
    threads: np.ndarray


@dataclass
class BlockMemory:
    """What one block sees. The profile is None when nothing is counted."""

    arguments: dict[int, GlobalMemory]
    shared_bytes: int
    profile: Profile | None
    open_copies: list[PendingCopy] = field(default_factory=list)
    groups: list[list[PendingCopy]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = np.full(self.shared_bytes + 16 & ~15, 0xFF, U8)
        self.initialised = np.zeros(len(self.shared), bool)

    def load(
        self, addresses: np.ndarray, size: int, count: int, space: str, active: np.ndarray, what: Instruction
    ) -> np.ndarray:
        """`[threads, count]` unsigned elements of `size` bytes; zeros where inactive."""
        result = np.zeros((len(addresses), count), UNSIGNED[size])
        for data, offsets, threads in self._places(addresses, size * count, space, active, False, what):
            index = offsets[:, None] // size + np.arange(count)
            result[threads] = data.view(UNSIGNED[size])[index]
        return result

    def store(
        self, addresses: np.ndarray, values: np.ndarray, space: str, active: np.ndarray, what: Instruction
    ) -> None:
        """values: `[threads, count]`."""
        size, count = values.dtype.itemsize, values.shape[1]
        for data, offsets, threads in self._places(addresses, size * count, space, active, True, what):
            index = offsets[:, None] // size + np.arange(count)
            data.view(UNSIGNED[size])[index] = values[threads].view(UNSIGNED[size])

    def begin_copy(
        self,
        shared: np.ndarray,
        source: np.ndarray,
        valid: np.ndarray,
        active: np.ndarray,
        what: Instruction,
    ) -> None:
        """cp.async of 16 bytes; until it is waited for the target holds 0xff."""
        values = self.load(source, 4, 4, "global", active & valid, what)
        self.store(shared, np.full((len(shared), 4), 0xFFFFFFFF, np.uint32), "shared", active, what)
        self.open_copies.append(PendingCopy(shared, values, active.copy()))

    def commit(self) -> None:
        self.groups.append(self.open_copies)
        self.open_copies = []

    def wait(self, groups_left: int) -> None:
        while len(self.groups) > groups_left:
            for copy in self.groups.pop(0):
                index = copy.addresses[copy.threads][:, None] // 4 + np.arange(4)
                self.shared.view(np.uint32)[index] = copy.values[copy.threads]

    def _places(
        self,
        addresses: np.ndarray,
        size: int,
        space: str,
        active: np.ndarray,
        write: bool,
        what: Instruction,
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(data, offsets, threads) per memory that is touched."""
        threads = np.flatnonzero(active)
        used = addresses[threads]
        if (used % size).any():
            raise PtxError(
                f"misaligned access of {size} bytes, thread {threads[(used % size).argmax()]}: {what}"
            )
        if space == "shared":
            yield self._shared_place(used, size, threads, active, addresses, write, what)
            return
        for key in np.unique(used >> ARGUMENT_SHIFT):
            mine = used >> ARGUMENT_SHIFT == key
            offsets = used[mine] & 0xFFFFFFFF
            yield self._global_place(int(key) - 1, offsets, size, threads[mine], write, what)

    def _shared_place(
        self,
        used: np.ndarray,
        size: int,
        threads: np.ndarray,
        active: np.ndarray,
        addresses: np.ndarray,
        write: bool,
        what: Instruction,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if len(used) and (used.max() + size > self.shared_bytes or used.min() < 0):
            raise PtxError(f"shared memory out of bounds, offset {used.max()} of {self.shared_bytes}: {what}")
        index = used[:, None] + np.arange(size)
        if write:
            self.initialised[index] = True
        elif not self.initialised[index].all():
            raise PtxError(f"uninitialised shared memory is read: {what}")
        if self.profile is not None:
            self.profile.shared_access(what.place, addresses, size, active)
        return self.shared, used, threads

    def _global_place(
        self,
        argument: int,
        offsets: np.ndarray,
        size: int,
        threads: np.ndarray,
        write: bool,
        what: Instruction,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        memory = self.arguments.get(argument)
        if memory is None or offsets.max() + size > memory.nbytes:
            raise PtxError(f"out of bounds: argument {argument} at offset {offsets.max()}: {what}")
        if write and not memory.writable:
            raise PtxError(f"write to read-only argument {argument}: {what}")
        if self.profile is not None:
            self.profile.global_access(argument, offsets, threads // 32, size)
        return memory.data, offsets, threads
