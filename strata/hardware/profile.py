"""HardwareProfile: what a machine has and how fast it is, each speed with where the figure comes from.

`probe.py` reads one from this machine, `profile_file.py` from YAML (`--hardware`). A profile is measured fact
and is never rewritten; the plan and the simulator are functions of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from strata.hardware.numa import MemoryNode
from strata.hardware.pci import Link

Source = Literal["measured", "field", "datasheet", "assumed"]
"""measured: on this machine. field: somebody's report of such a machine. datasheet: the maker's peak."""


MAX_RATE = 1e18
"""Of bytes or multiply-adds per second: far above every machine, and far below where sums of floats fail."""


@dataclass(frozen=True)
class Rate:
    """A speed per second (bytes or multiply-adds) and where the figure comes from."""

    value: float
    source: Source

    def __post_init__(self) -> None:
        if not 0 < self.value <= MAX_RATE:
            raise ValueError(f"a rate of {self.value}")


@dataclass(frozen=True)
class Processor:
    """name: as it calls itself. isa: the kernels' instruction set, "" = too old for them.

    core_macs: multiply-adds per second of one core in the product of 4-bit weights and many tokens.
    """

    name: str
    isa: str
    core_macs: Rate


@dataclass(frozen=True)
class DeviceProfile:
    """A graphics card. memory: bytes. node: the memory node it hangs from, None = unknown.

    read: its own memory. macs: dense 16-bit multiply-adds with f32 sums. to_device, to_host: copies from and
    to page-locked host memory.
    """

    name: str
    memory: int
    node: int | None
    link: Link | None
    read: Rate
    macs: Rate
    to_device: Rate
    to_host: Rate


@dataclass(frozen=True)
class HardwareProfile:
    """One machine as one process may use it.

    nodes: at least one; node_read: read bandwidth of each by its own threads, in the order of `nodes`.
    memory_limit: what the tightest control group allows, None = no limit; available: bytes that are free now
    under both. quota: CPUs' worth of time, None = all. warnings: sentences for the user.
    """

    name: str
    processor: Processor
    nodes: tuple[MemoryNode, ...]
    node_read: tuple[Rate, ...]
    available: int
    memory_limit: int | None = None
    quota: float | None = None
    device: DeviceProfile | None = None
    disk_read: Rate = Rate(2e9, "assumed")
    warnings: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes of host memory that the process may use at most: its nodes', or its groups' limit."""
        total = sum(node.memory for node in self.nodes if node.usable)
        return total if self.memory_limit is None else min(total, self.memory_limit)

    @property
    def allowed_cpus(self) -> tuple[int, ...]:
        """CPUs that the process may use."""
        return tuple(sorted(cpu for node in self.nodes for cpu in node.cpus))

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, bytes/s, multiply-adds/s."""
        return {**dataclasses.asdict(self), "memory": self.memory}
