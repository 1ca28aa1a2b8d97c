"""What ptxas says about a kernel, and how many of its blocks an SM of the RTX 3090 (sm_86) can hold.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", column 8.6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

THREADS_PER_SM, BLOCKS_PER_SM, REGISTERS_PER_SM = 1536, 16, 65536
SHARED_PER_SM, SHARED_RESERVED_PER_BLOCK = 100 << 10, 1 << 10
REGISTER_UNIT = 256
"""A warp's registers are given out in multiples of this."""

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """Per thread: registers, bytes of stack, bytes spilled (stores and loads)."""

    registers: int
    stack: int
    spills: int

    def blocks_per_sm(self, threads: int, shared_bytes: int) -> int:
        """Resident blocks of this size."""
        warps = threads // 32
        per_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS_PER_SM // per_warp // warps
        by_shared = SHARED_PER_SM // (shared_bytes + SHARED_RESERVED_PER_BLOCK)
        return min(BLOCKS_PER_SM, THREADS_PER_SM // threads, by_registers, by_shared)

    def occupancy(self, threads: int, shared_bytes: int) -> float:
        """Resident threads of the SM's 1,536."""
        return self.blocks_per_sm(threads, shared_bytes) * threads / THREADS_PER_SM


def usage_of(log: str) -> dict[str, Usage]:
    """By entry, from the log of `--ptxas-options=-v`."""
    return {
        match["name"]: Usage(
            int(match["registers"]), int(match["stack"]), int(match["stores"]) + int(match["loads"])
        )
        for match in _ENTRY.finditer(log)
    }
