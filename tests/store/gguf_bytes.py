"""GGUF files put together byte by byte, so that tests can break any field."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT16 = 4, 5, 6, 7, 8, 9, 2


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def strings(values: list[str]) -> bytes:
    return array(STRING, len(values), b"".join(text(v) for v in values))


def tensor_info(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@dataclass
class Gguf:
    """A whole file; by default one F32 tensor `a` of 8 values."""

    keys: list[bytes] = field(
        default_factory=lambda: [key_value("general.architecture", STRING, text("llama"))]
    )
    tensors: list[bytes] = field(default_factory=lambda: [tensor_info("a", [8])])
    data: bytes = bytes(range(32))
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None

    def build(self) -> bytes:
        n_keys = len(self.keys) if self.key_count is None else self.key_count
        n_tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        header = b"GGUF" + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        header += b"".join(self.keys) + b"".join(self.tensors)
        return header + bytes(-len(header) % 32) + self.data
