"""CPUs, cores, nodes and quotas read from made-up machines, and what is chosen from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata.hardware.cgroup import cpu_quota
from strata.hardware.cpu import CpuTopology, NumaNode, choose_cpus, numa_nodes, physical_cores, topology
from strata.hardware.files import format_cpu_list, parse_cpu_list

TWO_SOCKETS = CpuTopology(
    tuple(range(8)), (0, 1, 2, 3), (NumaNode(0, (0, 1, 4, 5)), NumaNode(1, (2, 3, 6, 7))), None
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="ascii")
    return root


def two_nodes(root: Path) -> Path:
    """Two nodes of two cores with two threads each; the second thread of core n is CPU n + 4."""
    files = {"sys/devices/system/node/online": "0-1"}
    files |= {
        f"sys/devices/system/node/node{n}/cpulist": f"{2 * n}-{2 * n + 1},{2 * n + 4}-{2 * n + 5}"
        for n in (0, 1)
    }
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    return write(root, files)


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_survive_a_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == sorted(cpus)


def test_kernel_list_format() -> None:
    assert parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_cpu_list("0-3,4-7") == list(range(8))
    assert parse_cpu_list("") == []


@given(st.text(max_size=20))
def test_any_text_is_a_list_or_a_sentence(text: str) -> None:
    try:
        assert all(cpu >= 0 for cpu in parse_cpu_list(text))
    except ConfigError as error:
        assert error.remedy


@pytest.mark.parametrize("text", ["3-1", "0-99999999999", "a", "1-", "-1", "0--1", "1;2"])
def test_broken_lists_are_named(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cpu_list(text)


def test_one_hardware_thread_per_core(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    assert physical_cores(range(8), root) == (0, 1, 2, 3)
    assert physical_cores([4, 5, 1], root) == (1, 4)  # core 1 is there twice


def test_nodes_keep_allowed_cpus_only(tmp_path: Path) -> None:
    """case-32: a node without any allowed CPU is no error."""
    machine = topology(two_nodes(tmp_path), allowed=[0, 1, 4])
    assert machine.nodes == (NumaNode(0, (0, 1, 4), 4), NumaNode(1, (), 4))
    assert machine.cores == (0, 1)


def test_no_node_directory_is_one_node(tmp_path: Path) -> None:
    assert numa_nodes([0, 1], tmp_path) == (NumaNode(0, (0, 1)),)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


def test_default_is_one_thread_per_core() -> None:
    choice = choose_cpus(machine=TWO_SOCKETS)
    assert choice.cpus == (0, 1, 2, 3) and choice.bind and not choice.warnings
    assert choice.describe() == "4 threads on CPUs 0-3"


def test_quota_limits_the_default() -> None:
    machine = CpuTopology((0, 1, 2, 3), (0, 1, 2, 3), (), 1.5)
    assert choose_cpus(machine=machine).cpus == (0, 1)


def test_second_hardware_threads_only_when_asked_for_more() -> None:
    assert choose_cpus(6, machine=TWO_SOCKETS).cpus == (0, 1, 4, 2, 3, 6)


def test_fewer_threads_than_cores_still_use_every_memory() -> None:
    assert choose_cpus(2, machine=TWO_SOCKETS).cpus == (0, 2)
    assert choose_cpus(3, machine=TWO_SOCKETS).cpus == (0, 1, 2)
    quota = CpuTopology(TWO_SOCKETS.allowed, TWO_SOCKETS.cores, TWO_SOCKETS.nodes, 1.5)
    assert choose_cpus(machine=quota).cpus == (0, 2)


def test_threads_of_a_node_stand_together_whatever_the_numbering() -> None:
    """Interleaved numbering (even CPUs on node 0, odd ones on node 1), as some firmware has it."""
    nodes = (NumaNode(0, (0, 2, 4, 6)), NumaNode(1, (1, 3, 5, 7)))
    machine = CpuTopology(tuple(range(8)), (0, 1, 2, 3), nodes, None)
    assert choose_cpus(machine=machine).cpus == (0, 2, 1, 3)
    assert choose_cpus(8, machine=machine).cpus == (0, 2, 4, 6, 1, 3, 5, 7)


def test_too_many_threads_are_cut_with_a_warning() -> None:
    """case-32: thread count <= allowed CPUs."""
    choice = choose_cpus(99, machine=TWO_SOCKETS)
    assert len(choice.cpus) == 8
    assert "99" in choice.warnings[0] and "8" in choice.warnings[0]


def test_foreign_cpus_are_left_out_or_threads_run_unbound() -> None:
    """case-32: intersect with the allowed set; empty means one warning and unbound threads, never an exit."""
    partly = choose_cpus(cpus=[2, 3, 40], machine=TWO_SOCKETS)
    assert partly.cpus == (2, 3) and partly.bind and "40" in partly.warnings[0]
    none = choose_cpus(2, cpus=[40, 41], machine=TWO_SOCKETS)
    assert len(none.cpus) == 2 and not none.bind
    assert len([text for text in none.warnings if "unbound" in text]) == 1
    assert none.describe() == "2 threads, unbound"


def test_one_allowed_cpu_of_several() -> None:
    """case-32: under `taskset -c N` the backend computes with one thread on that CPU."""
    last = max(os.sched_getaffinity(0))
    code = (
        "from strata.backends.cpu import CpuBackend; b = CpuBackend(); "
        "print(b.cpu.threads, b.chosen_cpus.cpus, CpuBackend(threads=1, cpus=[9999]).chosen_cpus.bind)"
    )
    done = subprocess.run(
        ["taskset", "-c", str(last), sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=60,
    )
    assert done.stdout.strip() == f"1 ({last},) False", done.stderr


def test_a_bound_thread_still_knows_the_process() -> None:
    """A thread that stands on one CPU, as one does while it computes, plans for all the process has."""
    code = (
        "import os; from strata.hardware.cpu import choose_cpus; before = choose_cpus(); "
        "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}); print(choose_cpus() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr


def test_threads_are_bound_only_where_there_are_several_nodes() -> None:
    one = CpuTopology((0, 1), (0, 1), (NumaNode(0, (0, 1)), NumaNode(1, ())), None)
    assert not choose_cpus(machine=one).bind and choose_cpus(cpus=[1], machine=one).bind
    assert choose_cpus(machine=one).describe() == "2 threads, unbound"
