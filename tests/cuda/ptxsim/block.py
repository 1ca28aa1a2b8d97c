"""The threads of one block: registers, program counters, operands."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ptxsim.memory import BlockMemory
from ptxsim.parse import Entry, Instruction, PtxError
from ptxsim.values import U32, U64, UNSIGNED, numpy_type

Handler = Callable[["Block", Instruction], None]
_ADDRESS = re.compile(r"\[\s*([$%\w.]+)\s*(?:\+\s*(-?\d+))?\s*\]")
Sizes = tuple[int, int, int]


class Block:
    """Registers are unsigned arrays over all threads (bool for predicates), as wide as they were written."""

    def __init__(
        self,
        entry: Entry,
        memory: BlockMemory,
        arguments: dict[str, int | float],
        index: Sizes,
        grid: Sizes,
        size: Sizes,
    ) -> None:
        self.entry, self.memory, self.arguments = entry, memory, arguments
        self.threads = size[0] * size[1] * size[2]
        linear = np.arange(self.threads)
        self.lane, self.warp = linear % 32, linear // 32
        self.registers: dict[str, np.ndarray] = {
            "%laneid": self.lane.astype(U32),
            "strata_shared": self._all(0),
        }
        for axis, stride in zip(range(3), (1, size[0], size[0] * size[1]), strict=True):
            name = "xyz"[axis]
            self.registers[f"%tid.{name}"] = (linear // stride % size[axis]).astype(U32)
            self.registers[f"%ctaid.{name}"] = self._all(index[axis])
            self.registers[f"%nctaid.{name}"] = self._all(grid[axis])
            self.registers[f"%ntid.{name}"] = self._all(size[axis])
        self.active = np.ones(self.threads, bool)
        self.all_active = True
        self._reduction: Instruction | None = None

    def _all(self, value: int) -> np.ndarray:
        return np.full(self.threads, value, U32)

    def run(self, handlers: dict[str, Handler]) -> None:
        """The lowest program counter first, until every thread has returned."""
        counters = np.zeros(self.threads, np.int64)
        live, waiting = np.ones(self.threads, bool), np.zeros(self.threads, bool)
        while live.any():
            ready = live & ~waiting
            if not ready.any():
                waiting[:] = False  # every live thread is at the barrier
                self._reduce(live)
                continue
            counter = counters[ready].min()
            here = ready & (counters == counter)
            if counter >= len(self.entry.code):
                live &= ~here
                continue
            self._step(int(counter), here, counters, live, waiting, handlers)

    def _step(
        self,
        counter: int,
        here: np.ndarray,
        counters: np.ndarray,
        live: np.ndarray,
        waiting: np.ndarray,
        handlers: dict[str, Handler],
    ) -> None:
        instruction = self.entry.code[counter]
        self.active = here
        if instruction.guard is not None:
            name, negated = instruction.guard
            self.active = here & (self.registers[name] ^ negated)
        self.all_active = bool(self.active.all())
        counters[here] = counter + 1
        self._count()
        kind = instruction.opcode[0]
        if kind == "bra":
            counters[self.active] = self.entry.labels[instruction.operands[0]]
        elif kind in ("ret", "exit"):
            live &= ~self.active
        elif kind in ("bar", "barrier") and instruction.opcode[1] != "warp":
            waiting |= self.active
            if "red" in instruction.opcode:
                self._reduction = instruction
        elif self.active.any():
            handler = handlers.get(kind)
            if handler is None:
                raise PtxError(f"unknown instruction {instruction}")
            handler(self, instruction)

    def _reduce(self, live: np.ndarray) -> None:
        """bar.red: the predicate of all threads that met."""
        if self._reduction is None:
            return
        target, _, source = self._reduction.operands
        combine = {"or": np.any, "and": np.all}[self._reduction.opcode[2]]
        self.active, self.all_active = live.copy(), bool(live.all())
        self.write(target, np.full(self.threads, combine(self.predicate(source)[live])))
        self._reduction = None

    def _count(self) -> None:
        if self.memory.profile is not None:
            self.memory.profile.instructions += int(self.active.reshape(-1, 32).any(axis=1).sum())

    # Operands

    def read(self, operand: str, ptx_type: str) -> np.ndarray:
        """A register or a constant as an array of the type."""
        wanted = numpy_type(ptx_type)
        if operand.startswith("-%"):
            return -self.read(operand[1:], ptx_type)
        bits = self.registers.get(operand)
        if bits is None and operand in self.arguments:  # the address of a struct among the parameters
            bits = np.full(self.threads, self.arguments[operand], U64)
        if bits is None:
            bits = np.full(self.threads, self._constant(operand), U64)
        if bits.dtype.itemsize != wanted.itemsize:
            bits = bits.astype(UNSIGNED[wanted.itemsize])
        return bits.view(wanted)

    def _constant(self, operand: str) -> int:
        if operand[:2] in ("0f", "0d", "0F", "0D"):
            return int(operand[2:], 16)
        if operand == "WARP_SZ":
            return 32
        try:
            return int(operand.rstrip("U"), 0) & (2**64 - 1)
        except ValueError:
            raise PtxError(f"{operand} was never written") from None

    def predicate(self, operand: str) -> np.ndarray:
        if operand.startswith("!"):
            return ~self.registers[operand[1:]]
        if operand in ("0", "1", "-1"):
            return np.full(self.threads, operand != "0")
        return self.registers[operand]

    def write(self, operand: str, values: np.ndarray) -> None:
        """Only the active threads' values change."""
        if operand == "_":
            return
        if values.dtype != bool:
            values = np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize])
        old = self.registers.get(operand)
        if self.all_active or old is None:
            self.registers[operand] = values
        else:
            self.registers[operand] = np.where(self.active, values, old.astype(values.dtype, copy=False))

    def address(self, operand: str) -> np.ndarray:
        """i64 per thread."""
        match = _ADDRESS.fullmatch(operand)
        if match is None:
            raise PtxError(f"unknown address {operand}")
        return self.read(match[1], "u64").astype(np.int64) + int(match[2] or 0)

    def require_whole_warps(self, what: Instruction) -> np.ndarray:
        """Indices of the warps that take part; a warp in parts is an error."""
        by_warp = self.active.reshape(-1, 32)
        split = by_warp.any(axis=1) & ~by_warp.all(axis=1)
        if split.any():
            raise PtxError(f"warp {split.argmax()} is divergent at the collective {what}")
        return np.flatnonzero(by_warp.all(axis=1))
