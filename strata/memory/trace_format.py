"""The bytes of a trace file; docs/trace-format.md describes them. Nothing read here is trusted."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from strata.errors import FileFormatError
from strata.memory.experts import ExpertSpace

MAGIC = b"STRATRC1"
HEAD, DATA, END = b"HEAD", b"DATA", b"END "
MAX_ACCESSES, MAX_CHOSEN = 4096, 65536
"""Per block: a reader needs about 2 MB, however long the trace is."""
MAX_BYTES, MAX_MICROSECONDS, MAX_NUMBER = (1 << 63) - 1, (1 << 32) - 1, (1 << 32) - 1
PREFILL = 1
"""The one flag of an access."""

_FRAME = struct.Struct("<4sIIQ")  # tag, stored bytes, bytes when inflated, xxh3-64 of the stored bytes
_COUNTS = struct.Struct("<II")  # of a block: accesses, chosen experts
_TOTALS = struct.Struct("<QQ")  # of the end frame: the same of the whole file
_ACCESS_COLUMNS = (("sequence", "<u4"), ("step", "<u4"), ("tokens", "<u4"), ("layer", "<u2"), ("flags", "u1"))
_COUNT_COLUMN = ("count", "<u4")
_CHOSEN_COLUMNS = (("expert", "<u2"), ("outcome", "u1"), ("bytes", "<u8"), ("microseconds", "<u4"))
_MAX_RAW = _COUNTS.size + 19 * MAX_ACCESSES + 15 * MAX_CHOSEN
_MAX_HEAD = 1 << 20
_REMEDY = "record it again; only the part before the damage can be read"

Columns = dict[str, NDArray[Any]]


class Outcome(IntEnum):
    """What became of one chosen expert."""

    UNKNOWN = 0
    HIT = 1
    FETCH = 2
    CPU = 3


@dataclass(frozen=True)
class Access:
    """What the router of one layer chose in one step, and what each expert cost.

    sequence: the request, 0 where a step holds several; step: counts up within it; tokens: rows of the batch.
    experts: distinct indices. outcomes, bytes (moved for it), microseconds (spent on it): one per expert, or
    empty where nothing was measured. A trace never holds token ids or text.
    """

    sequence: int
    step: int
    layer: int
    experts: tuple[int, ...]
    tokens: int = 1
    prefill: bool = False
    outcomes: tuple[Outcome, ...] = ()
    bytes: tuple[int, ...] = ()
    microseconds: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceHeader:
    """model: a name for people. expert_bytes: of one expert of each layer; empty when unknown."""

    model: str
    space: ExpertSpace
    expert_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.expert_bytes and len(self.expert_bytes) != len(self.space.per_layer):
            raise ValueError(
                f"{len(self.expert_bytes)} expert sizes for {len(self.space.per_layer)} layers in a trace"
            )
        if not all(0 <= size <= MAX_BYTES for size in self.expert_bytes):
            raise ValueError(f"expert sizes from {min(self.expert_bytes)} to {max(self.expert_bytes)}")

    def to_bytes(self) -> bytes:
        """JSON."""
        fields = {"model": self.model, "experts": self.space.per_layer, "expert_bytes": self.expert_bytes}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> TraceHeader:
        """Inverse of `to_bytes`; raises FileFormatError."""
        try:
            fields = json.loads(data)
            experts, sizes = fields["experts"], fields["expert_bytes"]
            if not all(type(number) is int for number in [*experts, *sizes]):
                raise TypeError("experts and expert_bytes must be whole numbers")
            return cls(str(fields["model"]), ExpertSpace(tuple(experts)), tuple(sizes))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FileFormatError(f"{where}: header: {type(error).__name__}: {error}") from None


def frame(tag: bytes, data: bytes) -> bytes:
    """A frame with its checksum; data of blocks is deflated."""
    stored = zlib.compress(data, 6) if tag == DATA else data
    return _FRAME.pack(tag, len(stored), len(data), xxhash.xxh3_64_intdigest(stored)) + stored


def end_frame(accesses: int, chosen: int) -> bytes:
    """The last frame: what the file holds in all."""
    return frame(END, _TOTALS.pack(accesses, chosen))


def read_frame(file: BinaryIO, where: str) -> tuple[bytes, bytes] | None:
    """Tag and content of the next frame; None where the file ends before it or within it (a torn end).

    Raises FileFormatError for what cannot be a frame.
    """
    offset = file.tell()
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    tag, stored, inflated, checksum = _FRAME.unpack(head)
    limit = {HEAD: _MAX_HEAD, DATA: _MAX_RAW, END: _TOTALS.size}.get(tag)
    if limit is None:
        raise FileFormatError(f"{where}: no frame at byte {offset}: it begins with {tag!r}", remedy=_REMEDY)
    if inflated > limit or stored > limit + 1024:
        sizes = f"{stored} bytes stored, {inflated} inflated; at most {limit}"
        raise FileFormatError(f"{where}: the frame at byte {offset} claims {sizes}", remedy=_REMEDY)
    data = file.read(stored)
    if len(data) < stored:
        return None
    if xxhash.xxh3_64_intdigest(data) != checksum:
        raise FileFormatError(f"{where}: the frame at byte {offset} fails its checksum", remedy=_REMEDY)
    content = _inflate(data, inflated) if tag == DATA else data
    if content is None or len(content) != inflated:
        raise FileFormatError(
            f"{where}: the frame at byte {offset} does not inflate to {inflated} bytes", remedy=_REMEDY
        )
    return tag, content


def check_end(content: bytes, accesses: int, chosen: int, where: str) -> None:
    """Raises FileFormatError unless the end frame counts what was read."""
    expected = _TOTALS.unpack(content) if len(content) == _TOTALS.size else ("?", "?")
    if expected != (accesses, chosen):
        raise FileFormatError(
            f"{where}: it says it has {expected[0]} accesses with {expected[1]} experts, "
            f"read were {accesses} with {chosen}",
            remedy=_REMEDY,
        )


def encode(accesses: Sequence[Access]) -> bytes:
    """A block's content: counts, then column after column."""
    per_access = {
        "sequence": [access.sequence for access in accesses],
        "step": [access.step for access in accesses],
        "tokens": [access.tokens for access in accesses],
        "layer": [access.layer for access in accesses],
        "flags": [PREFILL * access.prefill for access in accesses],
        "count": [len(access.experts) for access in accesses],
    }
    chosen = {
        "expert": [index for access in accesses for index in access.experts],
        "outcome": _costs(accesses, "outcomes"),
        "bytes": _costs(accesses, "bytes"),
        "microseconds": _costs(accesses, "microseconds"),
    }
    parts = [_COUNTS.pack(len(accesses), len(chosen["expert"]))]
    parts += [np.array(per_access[name], kind).tobytes() for name, kind in (*_ACCESS_COLUMNS, _COUNT_COLUMN)]
    parts += [np.array(chosen[name], kind).tobytes() for name, kind in _CHOSEN_COLUMNS]
    return b"".join(parts)


def _costs(accesses: Sequence[Access], column: str) -> list[int]:
    """One value per chosen expert; 0 where nothing was measured."""
    return [cost for access in accesses for cost in getattr(access, column) or (0,) * len(access.experts)]


def decode(content: bytes, space: ExpertSpace, where: str) -> list[Access]:
    """Inverse of `encode`; raises FileFormatError for anything that `encode` cannot have written."""
    columns = _columns(content, where)
    _check(columns, space, where)
    return list(_accesses(columns))


def _columns(content: bytes, where: str) -> Columns:
    accesses, chosen = _COUNTS.unpack_from(content) if len(content) >= _COUNTS.size else (0, 0)
    layout = [(name, kind, accesses) for name, kind in (*_ACCESS_COLUMNS, _COUNT_COLUMN)]
    layout += [(name, kind, chosen) for name, kind in _CHOSEN_COLUMNS]
    size = _COUNTS.size + sum(np.dtype(kind).itemsize * count for _, kind, count in layout)
    if not 0 < accesses <= MAX_ACCESSES or chosen > MAX_CHOSEN or size != len(content):
        raise FileFormatError(
            f"{where}: a block of {len(content)} bytes claims {accesses} accesses with {chosen} experts",
            remedy=_REMEDY,
        )
    columns: Columns = {}
    offset = _COUNTS.size
    for name, kind, count in layout:
        columns[name] = np.frombuffer(content, kind, count, offset)
        offset += columns[name].nbytes
    return columns


def _check(columns: Columns, space: ExpertSpace, where: str) -> None:
    per_layer = np.array(space.per_layer)
    counts, layers = columns["count"].astype(np.int64), columns["layer"]
    problem = None
    if counts.sum() != len(columns["expert"]):
        problem = f"its accesses count {counts.sum()} experts, there are {len(columns['expert'])}"
    elif layers.max() >= len(per_layer):
        problem = f"layer {layers.max()}, the model has {len(per_layer)}"
    elif (columns["expert"] >= per_layer[layers].repeat(counts)).any():
        worst = int(columns["expert"].max())
        problem = f"an expert up to {worst} in a layer that has fewer"
    elif columns["flags"].max(initial=0) > PREFILL:
        problem = f"flags {columns['flags'].max()}, known is {PREFILL}"
    elif columns["outcome"].max(initial=0) > max(Outcome):
        problem = f"outcome {columns['outcome'].max()}, known are 0 to {int(max(Outcome))}"
    elif columns["bytes"].max(initial=0) > MAX_BYTES:
        problem = f"{columns['bytes'].max()} bytes moved for one expert"
    if problem:
        raise FileFormatError(f"{where}: a block has {problem}", remedy=_REMEDY)


def _accesses(columns: Columns) -> Iterator[Access]:
    lists = {name: column.tolist() for name, column in columns.items()}
    ends = columns["count"].astype(np.int64).cumsum().tolist()
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        outcomes = tuple(Outcome(value) for value in lists["outcome"][start:end])
        measured = any(outcomes)
        yield Access(
            sequence=lists["sequence"][number],
            step=lists["step"][number],
            layer=lists["layer"][number],
            experts=tuple(lists["expert"][start:end]),
            tokens=lists["tokens"][number],
            prefill=bool(lists["flags"][number] & PREFILL),
            outcomes=outcomes if measured else (),
            bytes=tuple(lists["bytes"][start:end]) if measured else (),
            microseconds=tuple(lists["microseconds"][start:end]) if measured else (),
        )


def _inflate(data: bytes, size: int) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, size + 1)
    except zlib.error:
        return None
    return content if inflater.eof and not inflater.unused_data else None
