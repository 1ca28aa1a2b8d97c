"""A safetensors checkpoint (one file, shards with an index, a directory) as a CheckpointSource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import IncompleteError, UnsupportedError
from strata.store.checkpoint_file import DOWNLOAD_AGAIN, inside, read_json_file, shown
from strata.store.gguf_blocks import mxfp4_values
from strata.store.safetensors_index import open_shards
from strata.store.safetensors_quant import (
    BLOCKS,
    SCALE_SUFFIX,
    SCALES,
    Placed,
    check_method,
    floats,
    fp8_weights,
    mxfp4_weights,
)
from strata.store.source import QuantizedRows, TensorInfo


class SafetensorsSource:
    """CheckpointSource over safetensors. `config` is config.json, empty when there is none.

    An FP8 tensor's `X_scale_inv` is part of X and not listed. For an MXFP4 pair, `raw(X)` gives the
    bytes of `X_blocks` and `nbytes` counts both halves. Parts can still be had raw by their own names.
    """

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        """Open and check all files. Raises FileFormatError, IncompleteError, UnsupportedError, UsageError."""
        self.path = path
        shards = open_shards(path)
        self._placed = shards.tensors
        self._files = [*shards.files, *shards.described_by]
        self.config: Mapping[str, Any] = self._json(shards.directory, "config.json")
        producer = self._json(shards.directory, "hf_quant_config.json").get("quantization")
        block = check_method(self.config, producer, str(path))
        self._fp8 = fp8_weights(self._placed, block, str(path))
        self._mxfp4 = mxfp4_weights(self._placed, str(path))
        self.tensors: Mapping[str, TensorInfo] = self._list()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """See CheckpointSource."""
        tensor, file = self._find(name)
        return file.view(tensor.offset, tensor.nbytes)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """See CheckpointSource. Raises UnsupportedError for integers and packed types."""
        self._check_rows(name, start, stop)
        if name in self._fp8:
            return self._fp8[name].rows(start, stop)
        if name in self._mxfp4:
            codes, exponents = self._mxfp4[name].codes(start, stop)
            with np.errstate(over="ignore"):
                return mxfp4_values(codes.reshape(*exponents.shape, 32), exponents).reshape(codes.shape)
        return self._float_rows(name, start, stop)

    def quantized(self, name: str, start: int, stop: int) -> QuantizedRows | None:
        """See CheckpointSource: MXFP4 pairs only."""
        self._check_rows(name, start, stop)
        if name not in self._mxfp4:
            return None
        return QuantizedRows("mxfp4", *self._mxfp4[name].codes(start, stop))

    def files(self) -> Sequence[Path]:
        """See CheckpointSource: the safetensors files in order, then the index and the configs."""
        return self._files

    def _json(self, directory: Path, name: str) -> dict[str, Any]:
        if not (directory / name).exists():
            return {}
        self._files.append(inside(directory, name, "file"))
        return read_json_file(self._files[-1])

    def _list(self) -> dict[str, TensorInfo]:
        infos = {}
        for name, (tensor, file) in self._placed.items():
            if name.removesuffix(SCALE_SUFFIX) in self._fp8 and name.endswith(SCALE_SUFFIX):
                continue
            stem = name.removesuffix(BLOCKS)
            if name.endswith(SCALES) and name.removesuffix(SCALES) in self._mxfp4:
                continue
            if name.endswith(BLOCKS) and (pair := self._mxfp4.get(stem)):
                infos[stem] = TensorInfo(stem, "MXFP4", pair.shape, pair.nbytes, file.path, tensor.offset)
            else:
                infos[name] = TensorInfo(
                    name, tensor.dtype, tensor.shape, tensor.nbytes, file.path, tensor.offset
                )
        return infos

    def _find(self, name: str) -> Placed:
        found = self._mxfp4[name].blocks if name in self._mxfp4 else self._placed.get(name)
        if found is None:
            raise self._absent(name)
        return found

    def _absent(self, name: str) -> IncompleteError:
        return IncompleteError(f"{self.path}: no tensor {shown(name)}", remedy=DOWNLOAD_AGAIN)

    def _check_rows(self, name: str, start: int, stop: int) -> None:
        if name not in self.tensors:
            raise self._absent(name)
        count = prod(self.tensors[name].shape[:-1])
        if not 0 <= start <= stop <= count:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {count}")

    def _float_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        tensor, file = self._find(name)
        cols = tensor.shape[-1] if tensor.shape else 1
        stride = tensor.nbytes // max(prod(tensor.shape[:-1]), 1)
        values = floats(tensor.dtype, file.read(tensor.offset + start * stride, (stop - start) * stride))
        if values is None:
            raise UnsupportedError(
                f"{self.path}: tensor {shown(name)} of dtype {tensor.dtype} holds no plain float weights",
                remedy="use the BF16 or the GGUF version of this model",
            )
        return values.reshape(stop - start, cols)
