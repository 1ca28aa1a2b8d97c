"""What a conversion has finished so far: one JSON line per record, appended after the record is on disk.

The first line says what is being converted; a run continues only what it would have begun itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from strata.errors import StoreError
from strata.store.checkpoint_file import shown

_LISTED = 4
_SHORT = 80
_ABSENT = object()
JOURNAL_BEGIN = b'{"tool": '
"""The first bytes of every journal: `fingerprint.identity` names the tool first."""


@dataclass(frozen=True)
class Done:
    """A finished record. xxh3: of its bytes. replaced: NaN and Inf turned into 0, per source tensor."""

    file: str
    name: str
    xxh3: str
    replaced: dict[str, int]

    @property
    def key(self) -> tuple[str, str]:
        """Which record."""
        return self.file, self.name


class Journal:
    """An open journal; `done` holds the records of earlier runs and of this one.

    replaced_allowed: whether earlier runs may have turned NaN and Inf into 0.
    Raises StoreError for a journal of something else.
    """

    def __init__(self, path: Path, identity: dict[str, Any], *, replaced_allowed: bool = True) -> None:
        self._path = path
        identity = json.loads(json.dumps(identity))  # as it is read again: tuples are lists
        lines, length = _whole_lines(path)
        if lines and lines[0] != identity:
            raise StoreError(_told(path, lines[0], identity), remedy=_remedy(path))
        try:
            entries = [Done(**line) for line in lines[1:]]
        except TypeError as error:
            raise StoreError(f"{path} is damaged: {error}", remedy=_remedy(path)) from None
        self.done = {entry.key: entry for entry in entries}
        if not replaced_allowed and any(entry.replaced for entry in entries):
            raise StoreError(
                f"{path}: the unfinished conversion turned NaN and Inf into 0",
                remedy="continue with --allow-nan, or start over with --force",
            )
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, length)
        os.lseek(self._file, length, os.SEEK_SET)
        if not lines:
            self._append([identity])

    def add(self, entries: list[Done]) -> None:
        """Record entries whose bytes have been synced; they count from when this returns."""
        self._append([vars(entry) for entry in entries])
        self.done.update((entry.key, entry) for entry in entries)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        data = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a journal and their length in bytes; a torn last line does not count."""
    data = path.read_bytes() if path.exists() else b""
    lines: list[dict[str, Any]] = []
    length = 0
    for raw in data.splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not raw.endswith(b"\n") or not isinstance(line, dict):
            break
        lines.append(line)
        length += len(raw)
    return lines, length


def _told(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What differs between the run that was begun and this one, both values of each."""
    several = list(_differences("", found, wanted))
    parts = [f"{where} is {_value(old)} there, {_value(new)} now" for where, old, new in several[:_LISTED]]
    more = [f"and {len(several) - _LISTED} more"] if len(several) > _LISTED else []
    return f"{path} is of an unfinished run of something else: {'; '.join(parts + more)}"


def _differences(where: str, found: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost values that differ, by their way through objects and lists of the same length."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*wanted, *found)):
            inner = f"{where}: {key}" if where else str(key)
            yield from _differences(inner, found.get(key, _ABSENT), wanted.get(key, _ABSENT))
    elif _objects(found) and _objects(wanted) and len(found) == len(wanted):
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            yield from _differences(f"{where} {index + 1}", *pair)
    elif found != wanted:
        yield where, found, wanted


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _value(value: Any) -> str:
    """A value as people write it; objects that only one side has are not spelled out."""
    if value is _ABSENT or value is None or value in ({}, [], ""):
        return "not set"
    if isinstance(value, str):
        return shown(value)[1:-1] if len(value) <= _SHORT else shown(value[:_SHORT])[1:-1] + "..."
    if isinstance(value, dict):
        text = ", ".join(f"{key}={_value(entry)}" for key, entry in value.items())
        return text if len(text) <= _SHORT else f"{len(value)} entries"
    if isinstance(value, list):
        text = ", ".join(map(_value, value))
        return text if len(text) <= _SHORT else f"{len(value)} entries"
    return "on" if value is True else "off" if value is False else str(value)


def _remedy(path: Path) -> str:
    partial = path.with_suffix(".partial")
    return f"continue with the same source and options, or start over with --force (or delete {partial})"
