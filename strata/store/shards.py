"""The files of a store as safetensors files whose bytes follow from names and sizes alone.

A header is a pure function of the tensors in the file, so the writer can fill a file in any order and
the reader can compare headers instead of parsing them. Data starts at a 4 KiB boundary (the JSON is
padded with spaces) and tensors follow each other without holes, as the safetensors format demands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from strata.store.formats import RECORD_ALIGN, padded

DTYPE_BYTES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
_METADATA = {"format": "strata-shard"}
# Packed matrices need 64-byte starts and have sizes that are multiples of 64; F32 needs 4, BF16 2.
_ORDER = {"I64": 0, "U8": 1, "F32": 2, "BF16": 3}


@dataclass(frozen=True)
class Entry:
    """One tensor inside a shard; offset counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True)
class ShardLayout:
    """One file of the store. path: relative to the store. entries are in file order."""

    path: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        last = self.entries[-1] if self.entries else None
        return last.offset + last.nbytes if last else len(self.header)


def shard_layout(
    path: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] = MappingProxyType(_METADATA),
) -> ShardLayout:
    """Lay out tensors (name, dtype, shape), I64 and U8 first: their order inside a dtype is kept."""
    ordered = sorted(tensors, key=lambda tensor: _ORDER[tensor[1]])
    sized = []
    offset = 0
    for name, dtype, shape in ordered:
        nbytes = DTYPE_BYTES[dtype]
        for size in shape:
            nbytes *= size
        sized.append((name, dtype, shape, nbytes, offset))
        offset += nbytes
    header = _header(sized, metadata)
    entries = (
        Entry(name, dtype, shape, nbytes, len(header) + at) for name, dtype, shape, nbytes, at in sized
    )
    return ShardLayout(path, header, tuple(entries))


def _header(sized: list[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str]) -> bytes:
    """Length (u64, little endian) and JSON, padded so that data starts at a multiple of 4 KiB."""
    tensors = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        for name, dtype, shape, nbytes, at in sized
    }
    text = json.dumps({"__metadata__": dict(metadata), **tensors}, separators=(",", ":")).encode()
    text = text.ljust(padded(8 + len(text), RECORD_ALIGN) - 8)
    return len(text).to_bytes(8, "little") + text
