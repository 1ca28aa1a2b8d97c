"""The kernel's calls about memory nodes, on the machine at hand: it has one node at least."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys

import numpy as np
import pytest

from strata.hardware.cpu import topology
from strata.hardware.numa import memory_nodes
from strata.hardware.numa_calls import NumaCalls, Policy

CALLS = NumaCalls()
PAGE = mmap.PAGESIZE
MISSING = 63
"""A node that no machine of ours has; the kernel's mask has room for it."""


def first_node() -> int:
    return next(node.index for node in memory_nodes(topology()) if node.usable)


@pytest.fixture
def pages() -> np.ndarray:
    """Eight pages that nobody has touched."""
    return np.frombuffer(mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def addresses(pages: np.ndarray) -> list[int]:
    return [pages.ctypes.data + i * PAGE for i in range(8)]


def supported() -> bool:
    try:
        CALLS.nodes_of([addresses(np.zeros(9 * PAGE, np.uint8))[0]])
    except OSError as error:
        assert error.errno in (errno.ENOSYS, errno.EPERM)  # containers forbid it, kernels lack it
        return False
    return True


needs_calls = pytest.mark.skipif(not supported(), reason="the kernel does not say where pages lie")


@needs_calls
def test_touched_pages_lie_somewhere_and_others_nowhere(pages: np.ndarray) -> None:
    pages[: 3 * PAGE] = 1
    found = CALLS.nodes_of(addresses(pages))
    assert all(node >= 0 for node in found[:3])
    assert set(found[3:]) <= {-errno.ENOENT, -errno.EFAULT}
    assert CALLS.nodes_of([]) == []


@needs_calls
def test_bound_memory_comes_from_its_node(pages: np.ndarray) -> None:
    node = first_node()
    CALLS.bind(pages.ctypes.data, pages.nbytes, [node], Policy.BIND)
    pages[:] = 1
    assert CALLS.nodes_of(addresses(pages)) == [node] * 8
    assert CALLS.move(addresses(pages), [node] * 8) == [node] * 8


@needs_calls
def test_a_node_that_is_not_there_is_an_error(pages: np.ndarray) -> None:
    pages[:] = 1
    with pytest.raises(OSError):
        CALLS.bind(pages.ctypes.data, pages.nbytes, [MISSING], Policy.BIND)
    with pytest.raises(OSError):
        CALLS.move(addresses(pages)[:1], [MISSING])


def policy_in(code: str) -> str:
    """What a new process prints; a thread's policy stays with it."""
    imports = "from strata.hardware.numa_calls import NumaCalls, OUTER_POLICY, Policy; calls = NumaCalls(); "
    done = subprocess.run(
        [sys.executable, "-c", imports + code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@needs_calls
def test_the_policy_of_a_thread() -> None:
    code = (
        "print(*OUTER_POLICY); [print(*calls.policy()) for p in (Policy.PREFERRED, Policy.INTERLEAVE, "
        "Policy.BIND) if calls.set_policy(({0},), p) is None]; print(*OUTER_POLICY)"
    )
    node = first_node()
    assert policy_in(code.format(node)).split("\n") == [
        "0 ()",
        f"1 ({node},)",
        f"3 ({node},)",
        f"2 ({node},)",
        "0 ()",
    ]


@needs_calls
def test_a_policy_from_outside_is_known() -> None:
    """As numactl does it: set, then start the program."""
    node = first_node()
    code = (
        "import os, sys; "
        f"calls.set_policy(({node},), Policy.BIND); "
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'from strata.hardware.numa_calls import OUTER_POLICY as o; print(o[0].name, o[1])'])"
    )
    assert policy_in(code) == f"BIND ({node},)"
