"""How much memory this process may still take: what the machine has free, and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

from strata.hardware.cgroup import memory_limit
from strata.hardware.files import ROOT, count_of, read_text

_MAX_BYTES = 1 << 50
"""No machine has a PiB of memory; numbers above are a broken file."""


def available_bytes(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping; files are read below `root`, so that tests can fake them.

    The kernel's MemAvailable, or the room left under the cgroups' limits when that is less.
    """
    limit = memory_limit(root)
    rooms = (meminfo(root / "proc/meminfo", "MemAvailable"), limit.room if limit else None)
    return min((room for room in rooms if room is not None), default=0)


def meminfo(path: Path, name: str) -> int | None:
    """Bytes of a line of /proc/meminfo, or of a node's meminfo ("Node 0 MemTotal: 5 kB")."""
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.split()[-1:] == [name]:
            size = count_of(value.removesuffix("kB"))
            return size * 1024 if size is not None and size * 1024 < _MAX_BYTES else None
    return None
