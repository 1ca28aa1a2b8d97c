"""How much memory this process may still take: what the machine has free, and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping; files are read below `root`, so that tests can fake them.

    The kernel's MemAvailable, or the room left under the cgroup's limit (v2, else v1) when that is less.
    """
    rooms = [room for room in (_meminfo(root), _cgroup_room(root)) if room is not None]
    return max(0, min(rooms, default=0))


def _meminfo(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_room(root: Path) -> int | None:
    """Limit minus usage, page cache counted as free; None without a limit."""
    base = root / "sys/fs/cgroup"
    limit, used = _read(base / "memory.max"), _read(base / "memory.current")
    if limit is None:
        base = base / "memory"
        limit, used = _read(base / "memory.limit_in_bytes"), _read(base / "memory.usage_in_bytes")
    if limit is None or used is None or not limit.strip().isdecimal() or not used.strip().isdecimal():
        return None
    return int(limit) - int(used) + _inactive_file(base)


def _inactive_file(base: Path) -> int:
    """Page cache that the kernel drops first: it counts as used but is free to take."""
    for line in (_read(base / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdecimal():
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
