"""Host memory in the largest pages that the system gives: 1 GiB, 2 MiB, transparent, plain.

A walk through gigabytes of KV misses the TLB on every 4 KiB page; huge pages also make page-locking fast.
Pages of 1 GiB and 2 MiB come from pools that the administrator reserved, transparent ones from the kernel
when it has some. Whatever fails, the next kind is tried, and the arena says which one it became and why.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.config.units import format_size
from strata.hardware.files import ROOT, read_text
from strata.hardware.numa_calls import NumaCalls, Policy

MIB, GIB = 1 << 20, 1 << 30
MOST_WASTE = 1 / 8
"""Share of a mapping that rounding up to whole huge pages may add."""

# Linux' numbers, which Python's mmap does not name (include/uapi/asm-generic/mman.h).
_MAP_HUGETLB, _MAP_HUGE_SHIFT = 0x40000, 26
_MADV_POPULATE_WRITE = 23


class System:
    """What an arena asks of Linux. Tests give one that refuses; every refusal is an OSError."""

    def map(self, nbytes: int, huge: int) -> mmap.mmap:
        """Anonymous memory, in reserved huge pages of `huge` bytes each unless that is 0."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if huge:
            flags |= _MAP_HUGETLB | (huge.bit_length() - 1) << _MAP_HUGE_SHIFT
        return mmap.mmap(-1, nbytes, flags=flags)

    def populate(self, mapping: mmap.mmap) -> None:
        """Take the pages now: one that is missing at the first touch would end the process (SIGBUS)."""
        mapping.madvise(_MADV_POPULATE_WRITE)

    def transparent(self, root: Path = ROOT) -> bool:
        """Whether the kernel gives transparent huge pages to those who ask."""
        enabled = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
        return "[always]" in enabled or "[madvise]" in enabled

    def advise_huge(self, mapping: mmap.mmap) -> None:
        """Ask for transparent huge pages."""
        mapping.madvise(mmap.MADV_HUGEPAGE)

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], *, strict: bool = False) -> None:
        """Prefer one memory node, or spread pages over several. Pages that are there already stay.

        strict: one node and no other. A node that is full of the page cache gives pages from elsewhere first
        to those who only prefer it; for those who insist it drops of the cache.
        """
        one = Policy.BIND if strict else Policy.PREFERRED
        NumaCalls().bind(address, nbytes, nodes, one if len(nodes) == 1 else Policy.INTERLEAVE)


@dataclass(frozen=True)
class HostArena:
    """memory: u8 [nbytes], zeros, from a boundary of 4096 bytes on; given back when nobody refers to it.

    kind: what its pages are. problems: why they are no better, and why it is not bound to its nodes.
    """

    memory: NDArray[np.uint8]
    kind: str
    nodes: tuple[int, ...]
    problems: tuple[str, ...]

    def describe(self) -> str:
        """A line for people, e.g. "512 MiB in transparent huge pages (2 MiB pages: none are free, see `strata
        doctor`)"."""
        where = f", memory node{'s' * (len(self.nodes) > 1)} {', '.join(map(str, self.nodes))}"
        reasons = f" ({'; '.join(map(_in_words, self.problems))})" if self.problems else ""
        return f"{format_size(self.memory.nbytes)} in {self.kind}{where if self.nodes else ''}{reasons}"


@dataclass(frozen=True)
class _Kind:
    """page: bytes of a huge page, 0 = none. reserved: out of a pool."""

    name: str
    page: int = 0
    reserved: bool = False

    def suits(self, nbytes: int) -> bool:
        """Whether pages of this kind are not too large."""
        if not self.reserved:
            return nbytes >= self.page
        return self.whole(nbytes) - nbytes <= MOST_WASTE * self.whole(nbytes)

    def whole(self, nbytes: int) -> int:
        """`nbytes` rounded up to whole pages."""
        return -(-nbytes // self.page) * self.page


def _in_words(problem: str) -> str:
    """ENOMEM of a pool says that it is empty, which is how most machines come."""
    kind, _, error = problem.partition(": ")
    empty = error == "ENOMEM" and any(one.name == kind and one.reserved for one in _KINDS)
    return f"{kind}: none are free, see `strata doctor`" if empty else problem


_KINDS = (
    _Kind("1 GiB pages", GIB, reserved=True),
    _Kind("2 MiB pages", 2 * MIB, reserved=True),
    _Kind("transparent huge pages", 2 * MIB),
    _Kind("plain pages"),
)


def host_arena(
    nbytes: int, nodes: Sequence[int] = (), system: System | None = None, *, strict: bool = False
) -> HostArena:
    """`nbytes` bytes in the first kind of pages that can be had. nodes: memory nodes for them, () = any.

    strict: of a single node, and of no other when that is full.

    Plain and transparent pages are taken when they are first written. OSError when there is not even plain
    memory.
    """
    system, problems = system or System(), []
    for kind in (kind for kind in _KINDS if kind.suits(nbytes)):
        try:
            memory, mapping = _map(system, nbytes, kind)
            unbound = _bind(system, memory, nodes, strict)
            if kind.reserved:
                _populate(system, mapping)
        except OSError as error:
            if kind is _KINDS[-1]:
                raise
            problems.append(f"{kind.name}: {_name(error)}")
            continue
        bound = () if unbound else tuple(nodes)
        return HostArena(memory, kind.name, bound, (*problems, *unbound))
    raise AssertionError("plain pages were neither given nor refused")


def _map(system: System, nbytes: int, kind: _Kind) -> tuple[NDArray[np.uint8], mmap.mmap]:
    """The bytes and the mapping that they lie in."""
    if not kind.page:
        mapping, start = system.map(nbytes, 0), 0
    elif kind.reserved:
        mapping, start = system.map(kind.whole(nbytes), kind.page), 0
    else:
        if not system.transparent():
            raise OSError("switched off")
        mapping = system.map(nbytes + kind.page, 0)
        system.advise_huge(mapping)
        start = -np.frombuffer(mapping, np.uint8).ctypes.data % kind.page
    return np.frombuffer(mapping, np.uint8)[start : start + nbytes], mapping


def _populate(system: System, mapping: mmap.mmap) -> None:
    """Kernels before 5.14 cannot: there the reservation must be trusted."""
    try:
        system.populate(mapping)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _bind(system: System, memory: NDArray[np.uint8], nodes: Sequence[int], strict: bool) -> list[str]:
    """What kept the memory from being bound to the nodes."""
    if not nodes:
        return []
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        system.bind(start, memory.ctypes.data + memory.nbytes - start, nodes, strict=strict)
    except OSError as error:
        return [f"binding to memory node {', '.join(map(str, nodes))}: {_name(error)}"]
    return []


def _name(error: OSError) -> str:
    return errno.errorcode[error.errno] if error.errno else str(error)
