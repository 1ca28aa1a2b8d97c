"""The header of one safetensors file, checked by the format's own rules before anything is used.

Format: 8 bytes little-endian header length, a JSON object, then the data without holes or overlaps
(github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from strata.errors import FileFormatError, UnsupportedError
from strata.store.checkpoint_file import (
    BROKEN,
    DOWNLOAD_AGAIN,
    MAX_JSON_BYTES,
    CheckpointFile,
    check_tensor_name,
    parse_json,
    shown,
)

MAX_DIMS = 16
# Bits per element of every dtype of the format.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True)
class StoredTensor:
    """offset: from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """tensors in the order of the header; metadata: the `__metadata__` strings."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def parse_safetensors(file: CheckpointFile) -> SafetensorsHeader:
    """Read and check the header. Raises FileFormatError, UnsupportedError for unknown dtypes."""
    path = file.path
    if file.size < 8:
        raise FileFormatError(
            f"{path}: {file.size} bytes, a safetensors file needs at least 8", remedy=DOWNLOAD_AGAIN
        )
    length = int.from_bytes(file.read_bytes(0, 8), "little")
    if length > MAX_JSON_BYTES:
        raise FileFormatError(
            f"{path}: header length {length} is above the limit of {MAX_JSON_BYTES}", remedy=BROKEN
        )
    if length > file.size - 8:
        raise FileFormatError(
            f"{path}: truncated: header length {length}, but only {file.size - 8} bytes follow",
            remedy=DOWNLOAD_AGAIN,
        )
    entries = parse_json(file.read_bytes(8, length), f"{path}: header")
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extents(file, list(tensors.values()), 8 + length)
    return SafetensorsHeader(metadata, tensors)


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: __metadata__ is {type(value).__name__}, not an object", remedy=BROKEN)
    for key, text in value.items():
        if not isinstance(text, str):
            raise FileFormatError(
                f"{path}: __metadata__ {shown(key)} is {shown(text)}, not a string", remedy=BROKEN
            )
    return value


def _tensor(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    check_tensor_name(name, path)
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where} must have dtype, shape and data_offsets", remedy=BROKEN)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsupportedError(
            f"{where} has the unknown dtype {shown(dtype)}", remedy="use a BF16 or F16 file"
        )
    shape = _naturals(where, "shape", entry["shape"])
    offsets = _naturals(where, "data_offsets", entry["data_offsets"])
    bits = prod(shape[: MAX_DIMS + 1]) * DTYPE_BITS[dtype]
    if len(shape) > MAX_DIMS or bits % 8:
        raise FileFormatError(f"{where} has the impossible shape {shown(list(shape))}", remedy=BROKEN)
    if len(offsets) != 2 or offsets[1] - offsets[0] != bits // 8:
        raise FileFormatError(
            f"{where}: {dtype} {shown(list(shape))} needs {bits // 8} bytes, "
            f"data_offsets are {shown(list(offsets))}",
            remedy=BROKEN,
        )
    return StoredTensor(name, dtype, shape, data + offsets[0], bits // 8)


def _naturals(where: str, field: str, value: Any) -> tuple[int, ...]:
    """A list of integers from 0 to 2**63; True, 1.0 and -1 are none."""
    if not isinstance(value, list) or any(type(v) is not int or not 0 <= v < 1 << 63 for v in value):
        raise FileFormatError(f"{where}: {field} {shown(value)} is no list of natural numbers", remedy=BROKEN)
    return tuple(value)


def _check_extents(file: CheckpointFile, tensors: list[StoredTensor], data: int) -> None:
    """The tensors must fill the data exactly, one after the other."""
    end, last = data, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise FileFormatError(
                f"{file.path}: tensor {shown(tensor.name)} starts at data byte {tensor.offset - data} "
                f"and {fault} {shown(last)}, which ends at {end - data}",
                remedy=BROKEN,
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
    if end != file.size:
        fault = "truncated" if end > file.size else "bytes that belong to no tensor"
        raise FileFormatError(
            f"{file.path}: {fault}: the tensors end at byte {end}, the file has {file.size}",
            remedy=DOWNLOAD_AGAIN,
        )
