"""What a conversion has finished so far: one JSON line per record, appended after the record is on disk.

The first line says what is being converted; a run continues only what it would have begun itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from strata.errors import StoreError

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
            raise StoreError(_difference(path, lines[0], identity), remedy=_remedy(path))
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


def _difference(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Which part of the identity differs, with both values where they are short."""
    for part in sorted(set(found) | set(wanted)):
        old, new = found.get(part), wanted.get(part)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            key = next(key for key in sorted(set(old) | set(new)) if old.get(key) != new.get(key))
            part, old, new = f"{part}: {key}", old.get(key), new.get(key)
        return f"{path}: an unfinished run differs in its {part}: it has {old!r}, this one {new!r}"
    return f"{path}: an unfinished run of something else"


def _remedy(path: Path) -> str:
    partial = path.with_suffix(".partial")
    return f"continue with the same source and options, or start over with --force (or delete {partial})"
