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
    """The least room from this process's own cgroup up to the root; None without a limit.

    A service's limit (systemd's MemoryMax) stands at its own group, a container's at the root it sees.
    """
    base = root / "sys/fs/cgroup"
    own = base / _own_group(root)
    rooms = [_room(folder, "memory.max", "memory.current") for folder in (own, *own.parents)]
    rooms.append(_room(base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return min((room for room in rooms if room is not None), default=None)


def _own_group(root: Path) -> str:
    """Path of this process's group below the cgroup v2 mount; "" where there is none."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").strip("/")
    return ""


def _room(folder: Path, limit_file: str, use_file: str) -> int | None:
    """Limit minus use of one group, page cache counted as free."""
    limit, used = _read(folder / limit_file), _read(folder / use_file)
    if limit is None or used is None or not limit.strip().isdecimal() or not used.strip().isdecimal():
        return None
    return int(limit) - int(used) + _inactive_file(folder)


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
