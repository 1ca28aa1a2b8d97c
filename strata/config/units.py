"""Sizes with units: `23GiB`, `23GB`, `512 MiB` <-> bytes.

GB means 10**9 and GiB 2**30, as SI and IEC define them; `23G` could be either and is refused, as is a
bare number other than 0.
"""

from __future__ import annotations

import re
from decimal import Decimal

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS = {"b": 1, **_DECIMAL, **_BINARY}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_MAX_BYTES = 2**60


def parse_size(text: str) -> int:
    """Bytes of a size such as "23GiB" or "1.5 GB"; ValueError says what is wrong with the text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size; write a number with a unit, such as 23GiB, 23GB or 512MiB")
    number, unit = match.groups()
    if not unit and not Decimal(number):
        return 0  # of whatever unit
    if not unit:
        raise ValueError(f"has no unit; write {number}GiB (2^30 bytes) or {number}GB (10^9 bytes)")
    factor = UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(_unit_hint(number, unit))
    size = int(Decimal(number) * factor)
    if size > _MAX_BYTES:
        raise ValueError(f"is more than {_MAX_BYTES >> 60} EiB")
    return size


def _unit_hint(number: str, unit: str) -> str:
    letter = unit[0].upper()
    if len(unit) == 1 and letter in "KMGT":
        return (
            f"is ambiguous; write {number}{letter}B (powers of 1000) or {number}{letter}iB (powers of 1024)"
        )
    return f"has the unknown unit {unit!r}; known: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"


def format_bytes(size: int) -> str:
    """Bytes for people, exactly: "1.5 GiB (1,610,612,736 bytes)". Errors that set two numbers against each
    other say both so: near each other they would read the same in the unit alone."""
    return f"{size} bytes" if abs(size) < 1024 else f"{format_size(size)} ({size:,} bytes)"


def format_as(size: int, given: str) -> str:
    """Bytes for people in the unit of a size that was given, which `parse_size` takes: beside "85MB" stands
    "84.9 MB", not "81 MiB"."""
    unit = given.strip().lstrip("0123456789. \t")
    factor = UNITS.get(unit.lower(), 1)
    return f"{size:,} B" if factor == 1 else f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"


def format_size(size: int) -> str:
    """Bytes for people: the largest binary unit that keeps at least one whole digit, e.g. "1.5 GiB"."""
    value, unit = float(size), "B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, name
    if unit == "B":
        return f"{size} B"
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
