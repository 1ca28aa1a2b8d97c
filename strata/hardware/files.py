"""The kernel's small files: text, numbers, lists. What is absent, unreadable or no number is None."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from strata.errors import ConfigError

ROOT = Path("/")
_MAX_TEXT = 1 << 20
_CPU_LIMIT = 1 << 16
_DIGITS = 18


def read_text(path: Path) -> str | None:
    """The file without surrounding white space."""
    try:
        with path.open(encoding="ascii") as file:
            return file.read(_MAX_TEXT).strip()
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return None


def count_of(text: str | None) -> int | None:
    """A number that is not negative, as the kernel writes it."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS + 2 else None


def read_count(path: Path) -> int | None:
    """A file that holds one number."""
    return count_of(read_text(path))


def list_of(text: str | None) -> list[int] | None:
    """A CPU or node list in the kernel's format; None for text that is none."""
    try:
        return None if text is None else parse_cpu_list(text)
    except ConfigError:
        return None


def read_list(path: Path) -> list[int] | None:
    """A file that holds one such list."""
    return list_of(read_text(path))


def field_of(text: str | None, name: str) -> str | None:
    """The value of "name: value" or "name value" in a file of such lines."""
    for line in (text or "").splitlines():
        key, _, value = line.partition(":") if ":" in line else line.partition(" ")
        if key.strip() == name:
            return value.strip()
    return None


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's list format, "0-3,8" -> [0, 1, 2, 3, 8]; empty text is an empty list."""
    found: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ConfigError(
                f"{part[:40]!r} in the CPU list {text.strip()[:80]!r}", remedy='write it like "0-3,8"'
            )
        low, high = int(first), int(last or first)
        if high < low or high >= _CPU_LIMIT:
            cause = f"the range {low}-{high} in a CPU list"
            raise ConfigError(cause, remedy=f"rising numbers below {_CPU_LIMIT}")
        found.update(range(low, high + 1))
    return sorted(found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Inverse of parse_cpu_list: [0, 1, 2, 3, 8] -> "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
