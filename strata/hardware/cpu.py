"""The processor as the operating system shows it: allowed CPUs, physical cores, NUMA nodes, quotas.

Everything is read below `root` (normally "/"), so that tests can put up other machines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.hardware.cgroup import allowed_list, cpu_quota
from strata.hardware.files import ROOT, format_cpu_list, read_list

_OWN = tuple(sorted(os.sched_getaffinity(0)))
"""The process's CPUs, asked before any thread of ours is bound: a bound thread, and threads that it
starts, are told of one CPU only."""


@dataclass(frozen=True)
class NumaNode:
    """One memory node. cpus: those of its CPUs that this process may use (may be none).

    online: how many CPUs it has, allowed or not; 0 = unknown.
    """

    index: int
    cpus: tuple[int, ...]
    online: int = 0


@dataclass(frozen=True)
class CpuTopology:
    """allowed: CPUs of the process's affinity set. cores: one allowed CPU per physical core.

    nodes: NUMA nodes with their allowed CPUs; one node holding all where the system names none.
    quota: CPUs' worth of time that the cgroup grants, None = unlimited.
    """

    allowed: tuple[int, ...]
    cores: tuple[int, ...]
    nodes: tuple[NumaNode, ...]
    quota: float | None


@dataclass(frozen=True)
class CpuChoice:
    """Which CPUs the threads run on, one entry per thread. warnings: sentences for the user.

    bind: whether each stays on its CPU. cpus is then also where they stand; else only their number counts.
    teams: for each thread the number of its memory node, numbered from 0 in the order of the threads, where
    expert slices are computed by the threads of their node; () = all threads compute all. nodes: where memory
    that all threads read is spread; None: over the nodes that the threads are on.
    """

    cpus: tuple[int, ...]
    bind: bool
    warnings: tuple[str, ...] = ()
    teams: tuple[int, ...] = ()
    nodes: tuple[int, ...] | None = None

    def describe(self) -> str:
        """For `strata plan`: "2 threads on CPUs 0-1" or "2 threads, unbound"."""
        count = f"{len(self.cpus)} thread{'s' if len(self.cpus) != 1 else ''}"
        return f"{count} on CPUs {format_cpu_list(self.cpus)}" if self.bind else f"{count}, unbound"


def allowed_cpus(root: Path = ROOT) -> tuple[int, ...]:
    """CPUs that this process may run on: what taskset, cpusets, containers and unplugging left."""
    if root == ROOT:
        return _OWN
    base = root / "sys/devices/system/cpu"
    online = read_list(base / "online") or read_list(base / "present") or [0]
    allowed = allowed_list("cpus", root)
    return tuple(cpu for cpu in online if allowed is None or cpu in allowed)


def physical_cores(allowed: Sequence[int], root: Path = ROOT) -> tuple[int, ...]:
    """The first allowed hardware thread of every core: a second thread of a core adds no memory bandwidth."""
    cores: dict[tuple[int, ...], int] = {}
    for cpu in sorted(allowed):
        siblings = read_list(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(tuple(siblings or (cpu,)), cpu)
    return tuple(sorted(cores.values()))


def numa_nodes(allowed: Sequence[int], root: Path = ROOT) -> tuple[NumaNode, ...]:
    """All online nodes, each with the allowed ones of its CPUs."""
    base = root / "sys/devices/system/node"
    usable = set(allowed)
    nodes = []
    for index in read_list(base / "online") or ():
        cpus = read_list(base / f"node{index}/cpulist") or ()
        nodes.append(NumaNode(index, tuple(cpu for cpu in cpus if cpu in usable), len(cpus)))
    return tuple(nodes) if any(node.cpus for node in nodes) else (NumaNode(0, tuple(allowed)),)


def topology(root: Path = ROOT, allowed: Sequence[int] | None = None) -> CpuTopology:
    """The machine as this process may use it."""
    usable = tuple(sorted(allowed)) if allowed is not None else allowed_cpus(root)
    return CpuTopology(usable, physical_cores(usable, root), numa_nodes(usable, root), cpu_quota(root))


def choose_cpus(
    threads: int | None = None, cpus: Sequence[int] | None = None, machine: CpuTopology | None = None
) -> CpuChoice:
    """CPUs for `threads` threads (None = one per physical core) out of `cpus` (None = all allowed).

    Never fails on a foreign or shrunken machine: CPUs that are not allowed are left out, and when none of
    the wanted ones is left, the threads run unbound; each with a warning. Without `cpus`, threads are bound
    where several memory nodes have CPUs: bound ones stay near their memory, but cannot step aside. With busy
    neighbours on a machine of one node a decode step took about 1.5 times as long (two runs, uncontrolled
    load, 2 cores).
    """
    machine = machine or topology()
    warnings: list[str] = []
    wanted = list(machine.cores) if cpus is None else [cpu for cpu in cpus if cpu in machine.allowed]
    if cpus is not None and len(wanted) < len(cpus):
        lost = format_cpu_list(set(cpus) - set(wanted))
        warnings.append(f"CPUs {lost} are not allowed here (allowed: {format_cpu_list(machine.allowed)})")
    several = sum(bool(node.cpus) for node in machine.nodes) > 1
    pool = wanted or list(machine.cores)
    if cpus is None:
        more = threads is not None and threads > len(pool)
        pool = _in_turn(machine, [cpu for cpu in machine.allowed if cpu not in pool] if more else [])
    count = threads if threads is not None else _default_count(len(pool), machine.quota)
    if count > len(pool):
        warnings.append(f"{count} threads asked for, {len(pool)} CPUs allowed: using {len(pool)}")
    if not wanted:
        warnings.append("none of the wanted CPUs is allowed: threads run unbound")
    bind = bool(wanted) and (cpus is not None or several)
    return CpuChoice(_by_node(machine, pool[: max(1, count)]), bind, tuple(warnings))


def _in_turn(machine: CpuTopology, seconds: Sequence[int]) -> list[int]:
    """Cores and then `seconds`, one of each node in turn: fewer threads than cores still use every memory."""
    node_of = {cpu: place for place, node in enumerate(machine.nodes) for cpu in node.cpus}
    found: list[int] = []
    for cpus in (machine.cores, seconds):
        taken: dict[int, int] = {}
        turns = []
        for cpu in cpus:
            node = node_of.get(cpu, -1)
            turns.append((taken.get(node, 0), node, cpu))
            taken[node] = taken.get(node, 0) + 1
        found += [cpu for _, _, cpu in sorted(turns)]
    return found


def _by_node(machine: CpuTopology, cpus: Sequence[int]) -> tuple[int, ...]:
    """The CPUs of a node next to each other; else as they come."""
    place = {cpu: index for index, node in enumerate(machine.nodes) for cpu in node.cpus}
    return tuple(sorted(cpus, key=lambda cpu: place.get(cpu, -1)))


def _default_count(cores: int, quota: float | None) -> int:
    """More threads than the quota's CPUs would be stopped in the middle of every step."""
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
