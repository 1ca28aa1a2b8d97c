"""Memory nodes: size, free bytes, huge pages, distances. One node where the system names none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.hardware.cgroup import allowed_list
from strata.hardware.cpu import CpuTopology
from strata.hardware.files import ROOT, read_count, read_text
from strata.hardware.host_memory import meminfo
from strata.hardware.numa_calls import OUTER_POLICY, Policy

_NODES = "sys/devices/system/node"
_POOL = re.compile(r"hugepages-(\d{1,9})kB")
_MAX_PAGES = 1 << 32


@dataclass(frozen=True)
class HugePages:
    """Reserved huge pages of one size on one node. size: bytes of a page; total, free: pages."""

    size: int
    total: int
    free: int


@dataclass(frozen=True)
class MemoryNode:
    """One NUMA node.

    cpus, cores: CPUs that this process may use, and one of them per physical core; online: how many CPUs it
    has, allowed or not, 0 = unknown. memory, free: bytes, 0 =
    unknown or none. distances: to every node in the order of the nodes, 10 = itself; () = unknown.
    usable: whether the process may allocate here (cpuset.mems, numactl --membind).
    """

    index: int
    cpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    memory: int = 0
    free: int = 0
    distances: tuple[int, ...] = ()
    huge_pages: tuple[HugePages, ...] = ()
    usable: bool = True
    online: int = 0


def memory_nodes(machine: CpuTopology, root: Path = ROOT) -> tuple[MemoryNode, ...]:
    """The nodes of a machine, in the order of their numbers."""
    usable = _usable(root)
    single = len(machine.nodes) == 1
    cores = set(machine.cores)
    found = []
    for node in machine.nodes:
        folder = root / _NODES / f"node{node.index}"
        found.append(
            MemoryNode(
                index=node.index,
                cpus=node.cpus,
                cores=tuple(cpu for cpu in node.cpus if cpu in cores),
                memory=_memory(folder, root, "MemTotal", single),
                free=_free(folder, root, single),
                distances=_distances(folder, len(machine.nodes)),
                huge_pages=tuple(_pools(folder / "hugepages")),
                usable=usable is None or single or node.index in usable,
                online=node.online,
            )
        )
    return tuple(found)


def _usable(root: Path) -> frozenset[int] | None:
    """Nodes that memory may come from by cpusets and by the policy that the process was started with."""
    usable = allowed_list("mems", root)
    policy, nodes = OUTER_POLICY
    if root != ROOT or policy is not Policy.BIND:
        return usable
    return frozenset(nodes) if usable is None else usable & frozenset(nodes)


def _memory(folder: Path, root: Path, name: str, single: bool) -> int:
    """Of a node's meminfo; the machine's where there is one node only and it does not say."""
    size = meminfo(folder / "meminfo", name)
    if size is None and single:
        size = meminfo(root / "proc/meminfo", name)
    return size or 0


def _free(folder: Path, root: Path, single: bool) -> int:
    """Free bytes, with the page cache that the kernel drops first."""
    return sum(_memory(folder, root, name, single) for name in ("MemFree", "Inactive(file)"))


def _distances(folder: Path, nodes: int) -> tuple[int, ...]:
    """The kernel's table row, () when it does not fit the nodes (one was unplugged meanwhile)."""
    words = (read_text(folder / "distance") or "").split()
    if len(words) != nodes or not all(word.isdecimal() and 10 <= int(word[:4]) <= 255 for word in words):
        return ()
    return tuple(int(word) for word in words)


def _pools(folder: Path) -> Iterator[HugePages]:
    """Reserved pools, smallest pages first; sizes nobody reserved are left out."""
    pools = []
    for entry in folder.glob("hugepages-*kB"):
        name = _POOL.fullmatch(entry.name)
        total, free = read_count(entry / "nr_hugepages"), read_count(entry / "free_hugepages")
        if name and total and total < _MAX_PAGES:
            pools.append(HugePages(int(name[1]) * 1024, total, min(free or 0, total)))
    yield from sorted(pools, key=lambda pool: pool.size)
