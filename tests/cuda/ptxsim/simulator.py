"""Runs a whole launch, with the arrays of the same `Call` that the emulator takes."""

from __future__ import annotations

from itertools import product

import numpy as np
from runners import Call, Words, resolved

from ptxsim.arithmetic import ARITHMETIC
from ptxsim.block import Block
from ptxsim.memory import ARGUMENT_SHIFT, BlockMemory, GlobalMemory
from ptxsim.parse import PtxError, parse
from ptxsim.profile import Profile
from ptxsim.warp_ops import WARP_OPS

HANDLERS = {**ARITHMETIC, **WARP_OPS}


class PtxSimulator:
    """The kernels of one PTX text."""

    def __init__(self, ptx: str) -> None:
        self.entries = parse(ptx)

    def run(self, call: Call, profile: Profile | None = None) -> None:
        """Outputs are in the call's arrays afterwards; PtxError when a check fires."""
        entry = self.entries[call.entry]
        if len(entry.parameters) != len(call.arguments):
            raise PtxError(f"{call.entry} takes {len(entry.parameters)} arguments, not {len(call.arguments)}")
        values = resolved(call, lambda i: (i + 1) << ARGUMENT_SHIFT)
        values = [_in_parameters(a) if isinstance(a, Words) else a for a in values]
        buffers = {i: _buffer(a) for i, a in enumerate(values) if isinstance(a, np.ndarray)}
        names = [name for name, _ in entry.parameters]
        arguments = dict(zip(names, (_scalar(i, a) for i, a in enumerate(values)), strict=False))
        grid = (*call.grid, 1, 1)[:3]
        for z, y, x in product(range(grid[2]), range(grid[1]), range(grid[0])):
            memory = BlockMemory(buffers, call.shared_bytes, profile)
            Block(entry, memory, arguments, (x, y, z), grid, (call.block, 1, 1)).run(HANDLERS)
            if (memory.groups and any(memory.groups)) or memory.open_copies:
                raise PtxError(f"{call.entry} exits with copies that were never waited for")
        for i, buffer in buffers.items():
            array = values[i]
            if buffer.writable and isinstance(array, np.ndarray):
                array.reshape(-1).view(np.uint8)[:] = buffer.data[: buffer.nbytes]


def _in_parameters(words: Words) -> np.ndarray:
    """A struct in the parameters is memory that only reads of parameters reach."""
    array = words.values.copy()
    array.flags.writeable = False
    return array


def _buffer(array: np.ndarray) -> GlobalMemory:
    data = np.zeros(array.nbytes + 15 & ~15, np.uint8)
    data[: array.nbytes] = array.reshape(-1).view(np.uint8)
    return GlobalMemory(data, array.nbytes, bool(array.flags.writeable))


def _scalar(index: int, value: object) -> int | float:
    if isinstance(value, np.ndarray):
        return (index + 1) << ARGUMENT_SHIFT
    return 0 if value is None else value  # type: ignore[return-value]
