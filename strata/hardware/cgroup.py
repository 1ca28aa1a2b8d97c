"""What this process's control groups allow: memory, processor time, CPUs and memory nodes.

A limit may stand at the process's own group (systemd's MemoryMax), at any group above it (a slice, a pod), or
at the root that a container sees; the tightest holds. Both versions are read, also side by side (hybrid).
Everything is read below `root`, so that tests can put up other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from strata.hardware.files import ROOT, count_of, field_of, list_of, read_count, read_list, read_text

_MOUNTS = "sys/fs/cgroup"
_UNLIMITED = 1 << 60
"""From here on a limit is none: version 1 writes 2^63 less a page."""


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest limit. bytes: the limit; path: the file that sets it; room: bytes that may still be taken.

    room is the least over all groups: a parent may be fuller than the group with the lowest limit.
    """

    bytes: int
    path: Path
    room: int


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy. root: the group that is seen at `point` ("/" unless a container maps its own)."""

    version: int
    controllers: frozenset[str]
    root: str
    point: Path


def groups(controller: str, root: Path = ROOT) -> tuple[Path, ...]:
    """This process's group of a controller and every visible group above it, of both versions, own first."""
    found: list[Path] = []
    for mount in _mounts(root):
        if mount.version == 2 or controller in mount.controllers:
            found += _chain(mount, _own_group(mount.version, controller, root))
    return tuple(found)


def _mounts(root: Path) -> list[_Mount]:
    """From mountinfo; without it, the usual places."""
    found = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), (*right.split(), "", "", "")[:3]
        if kind in ("cgroup", "cgroup2") and len(fields) > 4:
            names = frozenset(options.split(",")) if kind == "cgroup" else frozenset[str]()
            point = root / _unescaped(fields[4]).lstrip("/")
            found.append(_Mount(2 if kind == "cgroup2" else 1, names, _unescaped(fields[3]), point))
    return found or list(_usual_mounts(root))


def _usual_mounts(root: Path) -> Iterator[_Mount]:
    yield _Mount(2, frozenset(), "/", root / _MOUNTS)
    for controller in ("memory", "cpu", "cpuset"):
        yield _Mount(1, frozenset({controller}), "/", root / _MOUNTS / controller)


def _unescaped(text: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _own_group(version: int, controller: str, root: Path) -> str:
    """Path of this process's group as /proc/self/cgroup names it; "/" where it does not."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (number == "0" and not names) if version == 2 else controller in names.split(","):
            return path
    return "/"


def _chain(mount: _Mount, group: str) -> list[Path]:
    """The group's folder and those above it up to the mount, as far as they exist.

    A container that keeps the host's view of /proc/self/cgroup maps its own group as the mount's root, so
    that root is taken off. A group outside of what is mounted leaves only the mount itself.
    """
    inside = PurePosixPath(group)
    if inside.is_relative_to(mount.root):
        inside = inside.relative_to(mount.root)
    parts = [part for part in inside.parts if part != "/"]
    if ".." in parts:
        parts = []
    folders = [mount.point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest memory limit and how much room is left; None without a limit.

    memory.high counts as a limit: beyond it the kernel slows the process down to reclaim. Version 1 tells in
    memory.stat what groups above a container, which it cannot see, allow.
    """
    tightest: tuple[int, Path] | None = None
    rooms: list[int] = []
    for folder in groups("memory", root):
        for path, limit in _memory_limits(folder):
            if limit < _UNLIMITED:
                tightest = min(tightest or (limit, path), (limit, path), key=lambda entry: entry[0])
                used = _used(folder)
                rooms += [] if used is None else [limit - used]
    if tightest is None:
        return None
    return MemoryLimit(*tightest, max(0, min(rooms, default=tightest[0])))


def _memory_limits(folder: Path) -> Iterator[tuple[Path, int]]:
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        limit = read_count(folder / name)
        if limit is not None:
            yield folder / name, limit
    above = count_of(field_of(read_text(folder / "memory.stat"), "hierarchical_memory_limit"))
    if above is not None:
        yield folder / "memory.stat", above


def _used(folder: Path) -> int | None:
    """Bytes in use, less the page cache that the kernel drops first: that is free to take."""
    used = read_count(folder / "memory.current")
    if used is None:
        used = read_count(folder / "memory.usage_in_bytes")
    if used is None:
        return None
    stat = read_text(folder / "memory.stat")
    cached = count_of(field_of(stat, "total_inactive_file"))  # version 1: with the groups below
    return used - ((count_of(field_of(stat, "inactive_file")) if cached is None else cached) or 0)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the tightest group grants (`cpu.max`, `cpu.cfs_quota_us`), None = all."""
    quotas = [quota for folder in groups("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    pair = (read_text(folder / "cpu.max") or "").split()
    if not pair:
        pair = [read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    quota, period = (count_of(part) for part in (*pair, "", "")[:2])
    return quota / period if quota and period else None


def allowed_list(kind: str, root: Path = ROOT) -> frozenset[int] | None:
    """CPUs (`kind` "cpus") or memory nodes ("mems") that the process may use; None: nothing is said.

    /proc/self/status is the kernel's own conclusion; the groups' files are asked as well, because a cpuset
    that was narrowed meanwhile shows there first.
    """
    status = field_of(read_text(root / "proc/self/status"), f"{kind.capitalize()}_allowed_list")
    sets = [list_of(status), *(_cpuset(folder, kind) for folder in groups("cpuset", root))]
    known = [frozenset(found) for found in sets if found]
    return frozenset.intersection(*known) if known else None


def _cpuset(folder: Path, kind: str) -> list[int] | None:
    """Version 2's effective list, version 1's, or what was asked for."""
    names = (f"cpuset.{kind}.effective", f"cpuset.effective_{kind}", f"cpuset.{kind}")
    return next((found for name in names if (found := read_list(folder / name))), None)
