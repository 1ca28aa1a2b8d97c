"""Recorded expert accesses: written while serving, read in bounded memory, as often as somebody likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from strata.errors import FileFormatError
from strata.memory import trace_format as form
from strata.memory.experts import ExpertSpace
from strata.memory.trace_format import Access, TraceHeader


class TraceSource(Protocol):
    """Anything that can be replayed: iterating starts at the beginning each time."""

    @property
    def header(self) -> TraceHeader:
        """What model it was recorded with."""

    def __iter__(self) -> Iterator[Access]:
        """All accesses in the order in which they happened."""


class TraceWriter:
    """Appends accesses to a new file, a block at a time; a process that dies loses at most one block.

    Not thread-safe. Raises FileExistsError for a file that is there: recordings are not overwritten.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._header = header
        self._block: list[Access] = []
        self._block_chosen = 0
        self._accesses = 0
        self._chosen = 0
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            text = "File exists, and recordings are not overwritten: choose another name"
            raise FileExistsError(error.errno, text, str(path)) from None
        self._file.write(form.MAGIC + form.frame(form.HEAD, header.to_bytes()))

    def add(self, access: Access) -> None:
        """One access; ValueError for one that a reader would refuse."""
        _check(access, self._header.space)
        count = len(access.experts)
        if len(self._block) == form.MAX_ACCESSES or self._block_chosen + count > form.MAX_CHOSEN:
            self._flush()
        self._block.append(access)
        self._block_chosen += count

    def close(self) -> None:
        """Write what is left and the end frame, which tells a whole file from a torn one."""
        if self._file.closed:
            return
        self._flush()
        self._file.write(form.end_frame(self._accesses, self._chosen))
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        if not self._block:
            return
        self._file.write(form.frame(form.DATA, form.encode(self._block)))
        self._file.flush()
        self._accesses += len(self._block)
        self._chosen += self._block_chosen
        self._block, self._block_chosen = [], 0


class TraceFile:
    """A trace on disk. Raises FileFormatError for what is none, OSError where it cannot be read.

    torn: whether the last pass found the file cut off, as a killed recording leaves it; what came before the
    cut was yielded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        with path.open("rb") as file:
            magic = file.read(len(form.MAGIC))
            if magic != form.MAGIC:
                raise FileFormatError(
                    f"{path} is no trace: it begins with {magic!r}, a trace with {form.MAGIC!r}",
                    remedy="give a file that Strata recorded, or a CSV of trace,seq,layer,step,experts",
                )
            first = form.read_frame(file, str(path))
            self._start = file.tell()
        if first is None or first[0] != form.HEAD:
            raise FileFormatError(f"{path}: the header is missing or cut off", remedy="record it again")
        self.header = TraceHeader.from_bytes(first[1], str(path))

    def __iter__(self) -> Iterator[Access]:
        where = str(self.path)
        accesses = chosen = 0
        with self.path.open("rb") as file:
            file.seek(self._start)
            while (found := form.read_frame(file, where)) is not None:
                tag, content = found
                if tag == form.END:
                    form.check_end(content, accesses, chosen, where)
                    end = file.tell()
                    if file.read(1):
                        raise FileFormatError(
                            f"{where}: {self.path.stat().st_size} bytes, the last frame ends at {end}",
                            remedy="record it again; traces are not joined by appending them",
                        )
                    self.torn = False
                    return
                if tag != form.DATA:
                    raise FileFormatError(f"{where}: a second header", remedy="record it again")
                for access in form.decode(content, self.header.space, where):
                    accesses += 1
                    chosen += len(access.experts)
                    yield access
        self.torn = True


def _check(access: Access, space: ExpertSpace) -> None:
    numbers = (access.sequence, access.step, access.tokens, *access.microseconds)
    if not all(0 <= number <= form.MAX_NUMBER for number in numbers):
        raise ValueError(f"a number of {access} is not within 0 to {form.MAX_NUMBER}")
    if not all(0 <= size <= form.MAX_BYTES for size in access.bytes):
        raise ValueError(f"bytes of {access} are not within 0 to {form.MAX_BYTES}")
    if not 0 <= access.layer < len(space.per_layer):
        raise ValueError(f"{access}: the model has {len(space.per_layer)} layers")
    known, experts = space.per_layer[access.layer], access.experts
    if not all(0 <= index < known for index in experts) or len(set(experts)) < len(experts):
        raise ValueError(f"experts of {access}: not different ones of the {known} of that layer")
    costs = {len(column) for column in (access.outcomes, access.bytes, access.microseconds)}
    if costs not in ({0}, {len(experts)}):
        raise ValueError(f"{access} has costs for {sorted(costs)} of {len(experts)} experts")
    if access.outcomes and not any(access.outcomes):
        raise ValueError(f"{access} has costs, but no outcome is known")
