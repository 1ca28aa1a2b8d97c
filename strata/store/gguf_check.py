"""Does a GGUF file's metadata fit together? Checked before anything is sized by it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileFormatError, IncompleteError
from strata.store.checkpoint_file import BROKEN, DOWNLOAD_AGAIN, listed, shown

MAX_BLOCKS = 10_000
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# Arrays with one entry per token, and the element types llama.cpp writes and reads.
_PER_TOKEN = {"scores": (np.float32,), "token_type": (np.int32, np.uint32)}


def check_metadata(path: Path, metadata: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raises FileFormatError for tokenizer arrays or a block count that cannot be, IncompleteError when
    whole blocks are absent."""
    if not isinstance(metadata.get("general.architecture", ""), str):
        raise FileFormatError(f"{path}: general.architecture is not a string", remedy=BROKEN)
    _check_tokenizer(path, metadata)
    _check_blocks(path, metadata, tensors)


def _check_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    for key in ("tokens", "merges", "added_tokens"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, list):
            raise _wrong(path, key, "an array of strings", value)
    tokens = metadata.get("tokenizer.ggml.tokens")
    for key, dtypes in _PER_TOKEN.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if not isinstance(value, np.ndarray) or value.dtype.type not in dtypes:
            raise _wrong(path, key, f"an array of {dtypes[0].__name__}", value)
        if tokens is not None and len(value) != len(tokens):
            raise FileFormatError(
                f"{path}: tokenizer.ggml.{key} has {len(value)} entries, tokenizer.ggml.tokens {len(tokens)}",
                remedy=BROKEN,
            )


def _wrong(path: Path, key: str, wanted: str, value: Any) -> FileFormatError:
    got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    return FileFormatError(f"{path}: tokenizer.ggml.{key} must be {wanted}, it is {got}", remedy=BROKEN)


def _check_blocks(path: Path, metadata: Mapping[str, Any], tensors: Collection[str]) -> None:
    prefix = metadata.get("general.architecture", "")
    count = metadata.get(f"{prefix}.block_count")
    if count is None:
        return
    field = f"{path}: {shown(prefix + '.block_count')}"
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_BLOCKS:
        raise FileFormatError(f"{field} is {shown(count)}, allowed are 1 to {MAX_BLOCKS}", remedy=BROKEN)
    present = {int(match[1]) for name in tensors if (match := _BLOCK.match(name))}
    if not present:  # vocabulary-only files carry the count but no tensors
        return
    if max(present) >= count:
        raise FileFormatError(
            f"{field} is {count}, but there is a tensor of block {max(present)}", remedy=BROKEN
        )
    # Extra prediction blocks (MTP) at the end are counted, but often left out of the file.
    spare = metadata.get(f"{prefix}.nextn_predict_layers", 0)
    needed = count - spare if isinstance(spare, int) else count
    missing = [f"blk.{index}" for index in range(needed) if index not in present]
    if missing:
        raise IncompleteError(
            f"{field} is {count}, but these blocks have no tensors: {listed(missing)}", remedy=DOWNLOAD_AGAIN
        )
