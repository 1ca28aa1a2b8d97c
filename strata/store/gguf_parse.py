"""The header of one GGUF file (versions 2 and 3): metadata and tensor infos, nothing believed unchecked.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length and count is compared with the
bytes that are left before anything of that size is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError, UnsupportedError
from strata.store.checkpoint_file import BROKEN, DOWNLOAD_AGAIN, CheckpointFile, check_tensor_name, shown
from strata.store.gguf_types import REMOVED_TYPES, TYPES_BY_ID, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME = 64
MAX_KEY = 65535
# Limits far above real files (the largest vocabularies: 10 MB of header, 800k strings, 60k tensors);
# they bound memory, since a Python string costs about 57 bytes where the file needs 8.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 2 << 20
MAX_ELEMENTS = 16 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
_DTYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", "", "", "<u8", "<i8", "<f8")
_SCALARS = {kind: np.dtype(code) for kind, code in enumerate(_DTYPES) if code}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """shape: row-major (the file's dimensions reversed); offset: from the start of the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """metadata: str, int, float, bool; string arrays are lists, other arrays 1-D numpy of their own dtype."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def parse_gguf(file: CheckpointFile, *, whole: bool = True) -> GgufHeader:
    """Read and check the header. Raises FileFormatError, UnsupportedError (version, byte order, types).

    whole False: the tensors' bytes need not be there.
    """
    if file.size < 24:
        raise FileFormatError(
            f"{file.path}: {file.size} bytes, a GGUF header needs at least 24", remedy=DOWNLOAD_AGAIN
        )
    cursor = _Cursor(file)
    version = _read_version(cursor)
    n_tensors, n_keys = cursor.u64("tensor count"), cursor.u64("metadata count")
    cursor.check_count("metadata count", n_keys, _MIN_KEY_BYTES, MAX_KEYS)
    cursor.check_count("tensor count", n_tensors, _MIN_TENSOR_BYTES, MAX_TENSORS)
    metadata = _read_metadata(cursor, n_keys)
    infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
    tensors = _place(file, infos, cursor.pos, _alignment(file.path, metadata))
    _check_extents(file, list(tensors.values()), whole)
    return GgufHeader(version, metadata, tensors)


class _Cursor:
    """Reads forward through the mapped header and refuses to step past its end."""

    def __init__(self, file: CheckpointFile) -> None:
        self.path = file.path
        self.buffer = file.mapping()
        self.end = min(file.size, MAX_HEADER_BYTES)
        self.pos = 0
        self.strings_left = MAX_STRINGS
        self.elements_left = MAX_ELEMENTS

    def fail(self, message: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: {message}", remedy=BROKEN)

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.end - self.pos:
            raise FileFormatError(
                f"{self.path}: {what} needs {nbytes} bytes at byte {self.pos}, the header ends at {self.end}",
                remedy=DOWNLOAD_AGAIN,
            )
        self.pos += nbytes
        return self.buffer[self.pos - nbytes : self.pos]

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def check_count(self, what: str, count: int, each: int, limit: int) -> None:
        """Refuse a count whose items, `each` bytes at least, cannot fit into the rest of the header."""
        left = self.end - self.pos
        if count > left // each:
            raise self.fail(f"{what} {count} needs at least {count * each} bytes, {left} are left")
        if count > limit:
            raise self.fail(f"{what} {count} is above the limit of {limit}")

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.fail(f"{what} has {length} bytes, at most {limit} are allowed")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {self.pos - length} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """A string array in a tight loop: 150k tokens must not cost noticeable start-up time."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.fail(f"{what}: more than {MAX_STRINGS} strings in the metadata")
        buffer, pos, end, unpack = self.buffer, self.pos, self.end, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(buffer, pos)[0]
                if pos > end:
                    raise self.fail(f"{what}[{len(out)}] has {pos - start} bytes, {end - start} are left")
                out.append(buffer[start:pos].decode("utf-8"))
        except UnicodeDecodeError:
            raise self.fail(f"{what}[{len(out)}] is not UTF-8") from None
        except struct.error:
            raise self.fail(f"{what}[{len(out)}] lies past the end of the header at {end}") from None
        self.pos = pos
        return out


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise FileFormatError(
            f"{cursor.path}: starts with {shown(magic)}, not {shown(MAGIC)}",
            remedy="name a GGUF file; GGML and GGJT files from before 2023 must be converted anew",
        )
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(
            f"{cursor.path}: a big-endian GGUF file (version reads {version:#x})",
            remedy="convert it with gguf-py's gguf_convert_endian.py",
        )
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{cursor.path}: GGUF version {version}; versions {VERSIONS[0]} to {VERSIONS[-1]} are supported",
            remedy="convert the model again with a current llama.cpp",
        )
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", MAX_KEY)
        if not key or not key.isprintable():
            raise cursor.fail(f"metadata key {index} is {shown(key)}")
        if key in metadata:
            raise cursor.fail(f"metadata key {shown(key)} stands twice")
        value = _read_value(cursor, shown(key), cursor.u32(f"type of {shown(key)}"))
        if key == "general.alignment" and not isinstance(value, np.uint32):
            raise cursor.fail(f"general.alignment has type {type(value).__name__}, uint32 is needed")
        metadata[key] = value.item() if isinstance(value, np.generic) else value
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    """str, list of str, numpy scalar or numpy array."""
    if kind == _STRING:
        return cursor.string(f"value of {key}")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"{key} has the unknown value type {kind}")
    return _numbers(cursor, key, kind, 1)[0]


def _read_array(cursor: _Cursor, key: str) -> list[str] | NDArray[Any]:
    kind, count = cursor.u32(f"element type of {key}"), cursor.u64(f"length of {key}")
    if kind == _STRING:
        cursor.check_count(f"length of {key}", count, 8, MAX_STRINGS)
        return cursor.strings(count, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"{key} is an array of the unsupported type {kind}")
    return _numbers(cursor, key, kind, count)


def _numbers(cursor: _Cursor, key: str, kind: int, count: int) -> NDArray[Any]:
    dtype = _SCALARS[kind]
    cursor.check_count(f"length of {key}", count, dtype.itemsize, cursor.elements_left)
    cursor.elements_left -= count
    values = np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype)
    if kind != _BOOL:
        return values
    if values.size and values.max() > 1:
        raise cursor.fail(f"{key} is a boolean of value {values.max()}, not 0 or 1")
    return values.astype(np.bool_)


@dataclass(frozen=True)
class _Info:
    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensor_info(cursor: _Cursor) -> _Info:
    name = cursor.string("tensor name")
    check_tensor_name(name, cursor.path, MAX_NAME)
    n_dims = cursor.u32(f"{name}: number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {shown(name)} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, f"{name}: dimensions"))
    return _Info(name, dims, cursor.u32(f"{name}: type"), cursor.u64(f"{name}: offset"))


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value: int = metadata.get("general.alignment", 32)
    if value == 0 or value & (value - 1):
        raise FileFormatError(f"{path}: general.alignment is {value}, not a power of two", remedy=BROKEN)
    return value


def _place(file: CheckpointFile, infos: list[_Info], header_end: int, align: int) -> dict[str, GgufTensor]:
    """Turn offsets into positions in the file; check types, sizes and alignment."""
    data = -(-header_end // align) * align
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise FileFormatError(
                f"{file.path}: tensor {shown(info.name)} stands twice in the header",
                remedy=BROKEN,
            )
        if info.offset % align:
            raise FileFormatError(
                f"{file.path}: tensor {shown(info.name)} has offset {info.offset}, not a multiple of {align}",
                remedy=BROKEN,
            )
        kind = _tensor_type(file.path, info)
        nbytes = prod(info.dims) // kind.values * kind.nbytes
        tensors[info.name] = GgufTensor(info.name, kind, info.dims[::-1], data + info.offset, nbytes)
    return tensors


def _tensor_type(path: Path, info: _Info) -> GgmlType:
    where = f"{path}: tensor {shown(info.name)}"
    kind = TYPES_BY_ID.get(info.type_id)
    if kind is None:
        known = REMOVED_TYPES.get(info.type_id)
        what = f"the withdrawn type {known} ({info.type_id})" if known else f"the unknown type {info.type_id}"
        raise UnsupportedError(f"{where} has {what}", remedy="use a file quantized by a current llama.cpp")
    if 0 in info.dims or prod(info.dims) >= 1 << 63:
        raise FileFormatError(f"{where} has the impossible dimensions {list(info.dims)}", remedy=BROKEN)
    if info.dims[0] % kind.values:
        raise FileFormatError(
            f"{where}: rows of {info.dims[0]} values are no multiple of {kind.name}'s block of {kind.values}",
            remedy=BROKEN,
        )
    return kind


def _check_extents(file: CheckpointFile, tensors: list[GgufTensor], whole: bool) -> None:
    """No overlaps, and nothing ends behind the end of a whole file."""
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            raise FileFormatError(
                f"{file.path}: tensors {shown(last)} and {shown(tensor.name)} overlap: "
                f"one ends at byte {end}, the other starts at {tensor.offset}",
                remedy=BROKEN,
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if whole and end > file.size:
            raise FileFormatError(
                f"{file.path}: truncated: tensor {shown(last)} ends at byte {end}, the file has {file.size}",
                remedy=DOWNLOAD_AGAIN,
            )
