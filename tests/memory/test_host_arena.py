"""Host memory: the best pages that can be had, and what is said of those that cannot. The system is faked."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from strata.memory.host_arena import GIB, MIB, System, host_arena

KINDS = {"1 GiB pages": GIB, "2 MiB pages": 2 * MIB}


class FakeSystem(System):
    """Maps plain memory whatever is asked for. refused: calls that fail and how ("map 2097152": ENOMEM)."""

    def __init__(self, refused: dict[str, int] | None = None, transparent: bool = True) -> None:
        self.refused = refused or {}
        self.enabled = transparent
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refused:
            raise OSError(self.refused[name], "refused")

    def map(self, nbytes: int, huge: int) -> mmap.mmap:
        self._call(f"map {huge}")
        assert nbytes % (huge or 1) == 0
        return super().map(nbytes, 0)

    def populate(self, mapping: mmap.mmap) -> None:
        self._call("populate")

    def transparent(self, root: Path = Path("/")) -> bool:
        return self.enabled

    def advise_huge(self, mapping: mmap.mmap) -> None:
        self._call("advise")

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], *, strict: bool = False) -> None:
        assert address % mmap.PAGESIZE == 0
        self._call(f"bind {list(nodes)}")


NONE_FREE = {"map 1073741824": errno.ENOMEM, "map 2097152": errno.ENOMEM}


@pytest.mark.parametrize(
    ("refused", "transparent", "kind", "problems"),
    [
        ({}, True, "1 GiB pages", ()),
        ({"map 1073741824": errno.ENOMEM}, True, "2 MiB pages", ("1 GiB pages: ENOMEM",)),
        (NONE_FREE, True, "transparent huge pages", ("1 GiB pages: ENOMEM", "2 MiB pages: ENOMEM")),
        (
            NONE_FREE,
            False,
            "plain pages",
            ("1 GiB pages: ENOMEM", "2 MiB pages: ENOMEM", "transparent huge pages: switched off"),
        ),
        (
            {**NONE_FREE, "advise": errno.EINVAL},
            True,
            "plain pages",
            ("1 GiB pages: ENOMEM", "2 MiB pages: ENOMEM", "transparent huge pages: EINVAL"),
        ),
        (
            {"map 1073741824": errno.EPERM, "populate": errno.EFAULT},
            True,
            "transparent huge pages",
            ("1 GiB pages: EPERM", "2 MiB pages: EFAULT"),
        ),
        ({"populate": errno.EINVAL}, True, "1 GiB pages", ()),
    ],
    ids=["all there", "no 1 GiB", "no reserved", "none", "no advice", "fewer than promised", "old kernel"],
)
def test_the_first_kind_that_works(
    refused: dict[str, int], transparent: bool, kind: str, problems: tuple[str, ...]
) -> None:
    system = FakeSystem(refused, transparent)
    arena = host_arena(2 * GIB, system=system)
    assert (arena.kind, arena.problems, arena.memory.nbytes) == (kind, problems, 2 * GIB)
    text = arena.describe()
    in_words = [problem.replace("ENOMEM", "none are free, see `strata doctor`") for problem in problems]
    assert text.startswith(f"2 GiB in {kind}") and all(problem in text for problem in in_words)


@pytest.mark.parametrize(
    ("nbytes", "kind"),
    [
        (5000, "plain pages"),
        (2 * MIB - 1, "2 MiB pages"),
        (3 * MIB, "transparent huge pages"),
        (100 * MIB, "2 MiB pages"),
        (GIB, "1 GiB pages"),
        (GIB + 2 * MIB, "2 MiB pages"),
    ],
)
def test_pages_that_are_too_large_are_not_asked_for(nbytes: int, kind: str) -> None:
    """Rounding up to them would waste more than an eighth."""
    arena = host_arena(nbytes, system=FakeSystem())
    assert (arena.kind, arena.problems, arena.memory.nbytes) == (kind, (), nbytes)


def test_no_memory_at_all_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        host_arena(5000, system=FakeSystem({"map 0": errno.ENOMEM}))


@pytest.mark.parametrize("nodes", [(1,), (0, 1)])
def test_binding_comes_before_the_first_touch(nodes: tuple[int, ...]) -> None:
    system = FakeSystem()
    arena = host_arena(4 * MIB, nodes, system)
    assert system.calls == ["map 2097152", f"bind {list(nodes)}", "populate"]  # reserved ones alone are taken
    assert arena.nodes == nodes and "memory node" in arena.describe()


def test_memory_that_cannot_be_bound_is_used_all_the_same() -> None:
    arena = host_arena(4 * MIB, (1,), FakeSystem({"bind [1]": errno.EPERM}))
    assert (arena.kind, arena.nodes) == ("2 MiB pages", ())
    assert arena.problems == ("binding to memory node 1: EPERM",)


@pytest.mark.parametrize(
    ("text", "given"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_what_the_kernel_says_of_transparent_pages(tmp_path: Path, text: str, given: bool) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text(text)
    assert System().transparent(tmp_path) is given
    assert not System().transparent(tmp_path / "nowhere")


@pytest.mark.parametrize("nbytes", [1, 5000, 3 * MIB])
def test_this_system(nbytes: int) -> None:
    """Zeros that can be written to the end, on a boundary of 4096 bytes, at node 0, which always is there."""
    arena = host_arena(nbytes, (0,))
    assert not arena.memory.any()
    arena.memory[:] = 7
    assert arena.memory.ctypes.data % 4096 == 0 and arena.memory.nbytes == nbytes
    assert np.all(arena.memory[-1:] == 7)
    assert arena.nodes == (0,) or "EPERM" in arena.describe() or "ENOSYS" in arena.describe()
