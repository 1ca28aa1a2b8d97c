"""safetensors files put together byte by byte, so that tests can break any field."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def build(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def write_sharded(folder: Path, shards: dict[str, dict[str, Any]], weight_map: dict[str, str]) -> Path:
    """Each shard a header; its data are zeros of the right length. Returns the index."""
    for name, header in shards.items():
        size = max((e["data_offsets"][1] for e in header.values()), default=0)
        (folder / name).write_bytes(build(header, bytes(size)))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index
