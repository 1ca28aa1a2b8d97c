"""Nodes, cores and CPUs of made-up machines: sockets, clusters, holes, and what a process gets of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import meminfo, node, siblings, status, write

from strata.hardware.cpu import CpuChoice, CpuTopology, NumaNode, choose_cpus, topology
from strata.hardware.files import format_cpu_list
from strata.hardware.numa import MemoryNode, memory_nodes


def machine(
    root: Path,
    nodes: list[list[int]],
    *,
    gib: list[int] | None = None,
    cores: list[list[int]] | None = None,
    online: Iterable[int] | None = None,
    allowed: str | None = None,
    mems: str | None = None,
) -> tuple[CpuTopology, tuple[MemoryNode, ...]]:
    """A machine with these CPUs per node. cores: CPUs that share one, those named nowhere have one each."""
    every = sorted(cpu for cpus in nodes for cpu in cpus)
    there = set(every if online is None else online)
    pairs = {cpu: format_cpu_list(set(core) & there) for core in cores or [] for cpu in core}
    files = {
        "sys/devices/system/node/online": format_cpu_list(range(len(nodes))),
        "sys/devices/system/cpu/present": format_cpu_list(every),
        "sys/devices/system/cpu/online": format_cpu_list(there),
        **siblings({cpu: pairs.get(cpu, str(cpu)) for cpu in every if cpu in there}),
        **meminfo(64, 60),
        **status(allowed or format_cpu_list(every), mems or format_cpu_list(range(len(nodes)))),
    }
    for index, cpus in enumerate(nodes):
        far = " ".join("10" if other == index else "20" for other in range(len(nodes)))
        size = 16 if gib is None else gib[index]
        files |= node(index, format_cpu_list(set(cpus) & there), size, far, free_gib=max(0, size - 2))
    found = topology(write(root, files))
    return found, memory_nodes(found, root)


def by_socket(cpu_count: int, nodes: int) -> list[list[int]]:
    return [list(range(cpu_count * i // nodes, cpu_count * (i + 1) // nodes)) for i in range(nodes)]


def in_turn(cpu_count: int, nodes: int) -> list[list[int]]:
    return [list(range(i, cpu_count, nodes)) for i in range(nodes)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("numbering", [by_socket, in_turn])
@pytest.mark.parametrize("smt", [False, True])
def test_one_thread_per_core_and_threads_of_a_node_together(
    tmp_path: Path, count: int, numbering: object, smt: bool
) -> None:
    """1, 2 and 4 nodes; CPUs numbered socket by socket or in turn; second hardware threads come last."""
    first = numbering(8, count)  # type: ignore[operator]
    nodes = [[*cpus, *([cpu + 8 for cpu in cpus] if smt else [])] for cpus in first]
    pairs = [[cpu, cpu + 8] for cpu in range(8)] if smt else None
    found, memory = machine(tmp_path, nodes, cores=pairs)
    assert found.cores == tuple(range(8))
    assert [entry.cores for entry in memory] == [tuple(cpus) for cpus in first]
    assert [entry.online for entry in memory] == [len(cpus) for cpus in nodes]
    chosen = choose_cpus(machine=found)
    assert chosen.cpus == tuple(cpu for cpus in first for cpu in cpus)
    assert chosen.bind == (count > 1)


def test_second_hardware_threads_may_stand_next_to_the_first(tmp_path: Path) -> None:
    """CPUs 2n and 2n + 1 share core n, as in most virtual machines."""
    found, _ = machine(tmp_path, by_socket(8, 2), cores=[[n, n + 1] for n in (0, 2, 4, 6)])
    assert found.cores == (0, 2, 4, 6) and choose_cpus(machine=found).cpus == (0, 2, 4, 6)


def test_clusters_inside_of_a_socket_are_nodes(tmp_path: Path) -> None:
    """Sub-NUMA clustering of two sockets: four nodes, near ones at 11, far ones at 21."""
    nodes = by_socket(16, 4)
    machine(tmp_path, nodes)
    rows = ["10 11 21 21", "11 10 21 21", "21 21 10 11", "21 21 11 10"]
    write(tmp_path, {f"sys/devices/system/node/node{i}/distance": row for i, row in enumerate(rows)})
    found = topology(tmp_path)
    memory = memory_nodes(found, tmp_path)
    assert [entry.distances for entry in memory][1] == (11, 10, 21, 21)
    assert choose_cpus(4, machine=found).cpus == (0, 4, 8, 12)


def test_cpus_that_are_offline(tmp_path: Path) -> None:
    """The first hardware thread of core 1 and all of core 3 are switched off: sysfs has no files of them."""
    pairs = [[cpu, cpu + 4] for cpu in range(4)]
    nodes = [[0, 1, 4, 5], [2, 3, 6, 7]]
    found, memory = machine(tmp_path, nodes, cores=pairs, online={0, 2, 4, 5, 6})
    assert found.allowed == (0, 2, 4, 5, 6) and found.cores == (0, 2, 5)
    assert [entry.cores for entry in memory] == [(0, 5), (2,)]


def test_a_socket_whose_cpus_are_all_offline_keeps_its_memory(tmp_path: Path) -> None:
    found, memory = machine(tmp_path, by_socket(4, 2), online={0, 1})
    assert found.nodes[1] == NumaNode(1, (), 0) and memory[1].memory and memory[1].usable
    assert not choose_cpus(machine=found).bind


def test_nodes_without_memory_and_without_cpus(tmp_path: Path) -> None:
    """A socket without modules, and a node that is memory only (CXL, HBM)."""
    found, memory = machine(tmp_path, [[0, 1], [2, 3], []], gib=[32, 0, 64])
    assert [(len(entry.cpus), entry.memory >> 30) for entry in memory] == [(2, 32), (2, 0), (0, 64)]
    assert choose_cpus(machine=found).cpus == (0, 1, 2, 3)


def test_cpuset_and_mems(tmp_path: Path) -> None:
    """case-32: cpuset.mems is limited, and of one node one CPU is allowed."""
    _, memory = machine(tmp_path, by_socket(8, 2), allowed="1-4", mems="0")
    assert [entry.cpus for entry in memory] == [(1, 2, 3), (4,)]
    assert [(entry.online, entry.usable) for entry in memory] == [(4, True), (4, False)]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.sets(st.integers(0, 23), min_size=1),
    st.sets(st.integers(0, 23)),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
)
def test_what_is_chosen_is_allowed_once_and_grouped(
    node_of: list[int], allowed: set[int], shared: set[int], threads: int | None, quota: bool
) -> None:
    """case-32, for any machine: only allowed CPUs, none twice, no more than there are, nodes in one piece."""
    usable = tuple(sorted(cpu for cpu in allowed if cpu < len(node_of))) or (0,)
    nodes = tuple(
        NumaNode(index, tuple(cpu for cpu in usable if node_of[cpu] == index)) for index in range(4)
    )
    cores = tuple(cpu for cpu in usable if cpu not in shared) or usable[:1]
    found = CpuTopology(usable, cores, nodes, 2.5 if quota else None)
    chosen: CpuChoice = choose_cpus(threads, machine=found)
    assert 1 <= len(chosen.cpus) <= len(usable) and set(chosen.cpus) <= set(usable)
    assert len(set(chosen.cpus)) == len(chosen.cpus)
    runs = [
        node_of[cpu]
        for i, cpu in enumerate(chosen.cpus)
        if i == 0 or node_of[cpu] != node_of[chosen.cpus[i - 1]]
    ]
    assert len(set(runs)) == len(runs)
    if threads is not None and threads <= len(cores):
        counts = [sum(node_of[cpu] == n for cpu in chosen.cpus) for n in range(4)]
        rooms = [sum(node_of[cpu] == n for cpu in cores) for n in range(4)]
        assert all(
            count == room or count >= max(counts) - 1 for count, room in zip(counts, rooms, strict=True)
        )
    assert (threads is not None and threads > len(usable)) == any("asked for" in t for t in chosen.warnings)
