"""Routing decisions as CSV with the columns trace,seq,layer,step,experts ("3;17;5"), plain or gzipped.

Such files are what others publish. Rows may be in any order: a router is asked layer by layer within a step.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.errors import FileFormatError
from strata.memory.experts import MAX_EXPERTS, MAX_LAYERS, ExpertSpace
from strata.memory.trace_format import MAX_NUMBER, Access, TraceHeader

COLUMNS = ("trace", "seq", "layer", "step", "experts")
_GZIP = b"\x1f\x8b"
_MAX_TEXT = 1 << 30
"""Characters in all: a zipped file may inflate to anything."""
_MAX_LINE = 1 << 20
_REMEDY = f"a CSV with the columns {','.join(COLUMNS)} is expected, experts separated by semicolons"


@dataclass(frozen=True)
class Routes:
    """One trace of a CSV, in memory, in the order sequence, step, layer."""

    header: TraceHeader
    accesses: tuple[Access, ...]

    def __iter__(self) -> Iterator[Access]:
        return iter(self.accesses)


def is_routes_csv(path: Path) -> bool:
    """Whether a file begins as such a CSV or as a gzipped file."""
    with path.open("rb") as file:
        head = file.read(len(_GZIP) + 32)
    return head.startswith(_GZIP) or head.startswith(",".join(COLUMNS).encode())


def read_routes(path: Path) -> dict[str, Routes]:
    """The traces of a CSV by name. Every layer has as many experts as the highest index of its trace says.

    Raises FileFormatError with the line for anything odd, OSError where the file cannot be read.
    """
    found: dict[str, list[Access]] = {}
    try:
        with path.open("rb") as raw:
            zipped = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            for name, access in _rows(path, gzip.GzipFile(fileobj=raw) if zipped else raw):
                found.setdefault(name, []).append(access)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path}: {error}", remedy="get the file again, it is damaged") from None
    if not found:
        raise FileFormatError(f"{path} has no rows", remedy=_REMEDY)
    return {name: _routes(name, accesses) for name, accesses in found.items()}


def _rows(path: Path, file: gzip.GzipFile | io.BufferedReader) -> Iterator[tuple[str, Access]]:
    reader = csv.reader(_lines(path, io.TextIOWrapper(file, "utf-8", errors="replace", newline="")))
    number = 0
    try:
        for number, row in enumerate(reader, 1):
            if number == 1:
                if tuple(row) != COLUMNS:
                    raise ValueError(f"columns {','.join(row)[:100]!r}")
            else:
                access = _access(row)  # first: a blank line has no row[0]
                yield row[0], access
    except (ValueError, csv.Error) as error:
        raise FileFormatError(f"{path}, line {max(number, 1)}: {error}", remedy=_REMEDY) from None


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    total = 0
    while line := text.readline(_MAX_LINE):
        total += len(line)
        if total > _MAX_TEXT:
            raise FileFormatError(
                f"{path}: more than {_MAX_TEXT} characters", remedy="cut it into several files"
            )
        yield line


def _access(row: list[str]) -> Access:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} fields, expected {len(COLUMNS)}")
    sequence, step = _number(row[1], "seq", MAX_NUMBER), _number(row[3], "step", MAX_NUMBER)
    layer = _number(row[2], "layer", MAX_LAYERS - 1)
    experts = tuple(_number(part, "expert", MAX_EXPERTS - 1) for part in row[4].split(";"))
    if len(set(experts)) < len(experts):
        raise ValueError(f"experts {row[4][:100]} name one twice")
    return Access(sequence, step, layer, experts)


def _number(text: str, name: str, high: int) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else -1
    if not 0 <= number <= high:
        raise ValueError(f"{name} is {text[:40]!r}, expected a number from 0 to {high}")
    return number


def _routes(name: str, accesses: list[Access]) -> Routes:
    accesses.sort(key=lambda access: (access.sequence, access.step, access.layer))
    experts = 1 + max(max(access.experts) for access in accesses)
    layers = {access.layer for access in accesses}
    space = ExpertSpace(tuple(experts if layer in layers else 0 for layer in range(max(layers) + 1)))
    return Routes(TraceHeader(name, space), tuple(accesses))
