"""Host memory: what the machine has, what is free, and what the cgroup allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata.errors import HardwareError

ROOT = Path("/")
# cgroup v1 writes "no limit" as the largest multiple of a page below 2^63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """Bytes. total and available already respect the cgroup's limit; limit is None where there is none."""

    total: int
    available: int
    limit: int | None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdecimal():
            found[name] = int(amount[0]) * (1024 if amount[-1] == "kB" else 1)
    return found


def _cgroup(root: Path) -> tuple[int | None, int]:
    """Limit and use of this process's memory cgroup: the tightest one from its own group to the root."""
    v1 = root / "sys/fs/cgroup/memory"
    if (v1 / "memory.limit_in_bytes").exists():
        return _number(v1 / "memory.limit_in_bytes"), _number(v1 / "memory.usage_in_bytes") or 0
    base, limit, used = root / "sys/fs/cgroup", None, 0
    own = _read(root / "proc/self/cgroup").partition("0::")[2].splitlines()
    group = base / own[0].lstrip("/") if own else base
    for folder in (group, *group.parents):
        found = _number(folder / "memory.max")
        if found is not None and (limit is None or found < limit):
            limit, used = found, _number(folder / "memory.current") or 0
        if folder == base:
            break
    return limit, used


def host_memory(root: Path = ROOT) -> HostMemory:
    """Read below `root`; HardwareError when the system does not say how much memory it has."""
    info = _meminfo(root)
    if "MemTotal" not in info or "MemAvailable" not in info:
        raise HardwareError("/proc/meminfo names no MemTotal and MemAvailable", remedy="run Strata on Linux")
    limit, used = _cgroup(root)
    if limit is None or limit >= info["MemTotal"]:
        return HostMemory(info["MemTotal"], info["MemAvailable"], None)
    return HostMemory(limit, max(0, min(info["MemAvailable"], limit - used)), limit)
