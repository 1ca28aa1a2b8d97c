"""Whether pages lie on the memory nodes that they were meant for: asked of the kernel, not believed."""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from strata.hardware.numa_calls import NumaCalls

SAMPLES = 256
"""Pages asked for per range: one call of some 50 us. A share of 2 % in the wrong place is found with 99 %."""
BATCH = 4096
"""Pages per call when all are gone through."""
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class PlacedRange:
    """Memory that should lie on `nodes`, one or several; address, nbytes: as the process sees it."""

    name: str
    address: int
    nbytes: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class PageCheck:
    """What was found of a range. sampled: pages asked for; right, absent (not touched yet), unknown (the
    kernel would not say); elsewhere: pages by the node that they lie on instead.

    moved, stuck: of all its pages, those that were then brought home and those that could not be. problem:
    why nothing could be asked, "" otherwise.
    """

    name: str
    nodes: tuple[int, ...]
    sampled: int = 0
    right: int = 0
    absent: int = 0
    unknown: int = 0
    elsewhere: Mapping[int, int] = field(default_factory=dict)
    moved: int = 0
    stuck: int = 0
    problem: str = ""

    @property
    def wrong(self) -> int:
        """Sampled pages on other nodes."""
        return sum(self.elsewhere.values())

    def describe(self) -> str:
        """One line with the figures, e.g. "experts of node 1: 250 of 256 sampled pages on node 1, 6 on 0"."""
        names = ", ".join(map(str, self.nodes))
        if self.problem:
            return f"{self.name}: not checked ({self.problem})"
        here, plural = self.sampled - self.absent, "s" * (len(self.nodes) > 1)
        text = f"{self.name}: {self.right} of {here} sampled pages on node{plural} {names}"
        text += "".join(f", {count} on node {node}" for node, count in sorted(self.elsewhere.items()))
        text += f", {self.absent} not touched yet" if self.absent else ""
        text += f"; {self.moved} pages moved" if self.moved else ""
        return text + (f"; {self.stuck} pages could not be moved" if self.stuck else "")


def check_pages(
    found: PlacedRange, calls: NumaCalls, samples: int = SAMPLES, *, move: bool = True
) -> PageCheck:
    """Sample a range; move: when any page lies elsewhere, all of the range are gone through and brought home.

    Moving copies pages and stops who reads them meanwhile: for after the start, not for every request. Of a
    range for several nodes only what lies on none of them is wrong, and goes to the first.
    """
    try:
        check = _sample(found, calls, samples)
        if not (move and check.wrong):
            return check
        moved, stuck = _bring_home(found, calls)
    except OSError as error:
        return PageCheck(found.name, found.nodes, problem=errno.errorcode.get(error.errno or 0, str(error)))
    return replace(check, moved=moved, stuck=stuck)


def _sample(found: PlacedRange, calls: NumaCalls, samples: int) -> PageCheck:
    first, count = found.address // _PAGE, _pages(found)
    wanted = min(samples, count)
    places = calls.nodes_of([(first + i * count // wanted) * _PAGE for i in range(wanted)])
    by_node = Counter(places)
    absent = by_node[-errno.ENOENT] + by_node[-errno.EFAULT]  # the zero page counts as a fault
    elsewhere = {node: n for node, n in by_node.items() if node >= 0 and node not in found.nodes}
    right = sum(by_node[node] for node in found.nodes)
    unknown = wanted - absent - right - sum(elsewhere.values())
    return PageCheck(found.name, found.nodes, wanted, right, absent, unknown, elsewhere)


def _pages(found: PlacedRange) -> int:
    return (found.address + found.nbytes - 1) // _PAGE - found.address // _PAGE + 1


def _bring_home(found: PlacedRange, calls: NumaCalls) -> tuple[int, int]:
    """Move what lies elsewhere: pages that moved, and pages that did not."""
    moved = stuck = 0
    for batch in _batches(found):
        wrong = [
            address
            for address, node in zip(batch, calls.nodes_of(batch), strict=True)
            if node >= 0 and node not in found.nodes
        ]
        after = calls.move(wrong, [found.nodes[0]] * len(wrong))
        home = sum(node in found.nodes for node in after)
        moved, stuck = moved + home, stuck + len(wrong) - home
    return moved, stuck


def _batches(found: PlacedRange) -> Iterator[Sequence[int]]:
    first, count = found.address // _PAGE, _pages(found)
    for start in range(0, count, BATCH):
        yield [(first + i) * _PAGE for i in range(start, min(start + BATCH, count))]
