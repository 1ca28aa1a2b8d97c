"""A GGUF model, in one file or split by gguf-split, as a CheckpointSource."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError, IncompleteError
from strata.store.checkpoint_file import DOWNLOAD_AGAIN, CheckpointFile, inside, listed, shown
from strata.store.gguf_blocks import dequantize
from strata.store.gguf_check import check_metadata
from strata.store.gguf_lossless import quantized_rows
from strata.store.gguf_parse import GgufHeader, GgufTensor, parse_gguf
from strata.store.source import QuantizedRows, TensorInfo

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufSource:
    """CheckpointSource over GGUF. `config` holds the metadata (of the first part when split):
    string arrays are lists, numeric arrays numpy arrays, the rest Python values."""

    kind = "gguf"

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        """Open the file, or all parts whichever part is named; whole False: their tensors may be missing.

        Raises FileFormatError, IncompleteError, UnsupportedError, UsageError.
        """
        self.path = path
        opened = _open_parts(path, whole)
        self._files = {file.path: file for file, _ in opened}
        self._tensors = _merge(opened)
        self.config: Mapping[str, Any] = opened[0][1].metadata
        self.tensors: Mapping[str, TensorInfo] = {
            t.name: TensorInfo(t.name, t.type.name, t.shape, t.nbytes, file.path, t.offset)
            for t, file in self._tensors.values()
        }
        check_metadata(path, self.config, self.tensors.keys())

    def raw(self, name: str) -> NDArray[np.uint8]:
        """See CheckpointSource."""
        tensor, file = self._find(name)
        return file.view(tensor.offset, tensor.nbytes)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """See CheckpointSource. Raises UnsupportedError for types without a dequantizer."""
        tensor, _ = self._find(name)
        values = dequantize(tensor.type.name, self._row_bytes(name, start, stop))
        return values.reshape(stop - start, tensor.shape[-1])

    def quantized(self, name: str, start: int, stop: int) -> QuantizedRows | None:
        """See CheckpointSource: Q4_0, Q4_1, Q8_0, MXFP4 exactly, Q4_K with fp16 scales."""
        tensor, _ = self._find(name)
        return quantized_rows(tensor.type.name, self._row_bytes(name, start, stop), stop - start)

    def files(self) -> Sequence[Path]:
        """See CheckpointSource: the parts in order."""
        return list(self._files)

    def _find(self, name: str) -> tuple[GgufTensor, CheckpointFile]:
        found = self._tensors.get(name)
        if found is None:
            raise IncompleteError(f"{self.path}: no tensor {shown(name)}", remedy=DOWNLOAD_AGAIN)
        return found

    def _row_bytes(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        tensor, file = self._find(name)
        rows = prod(tensor.shape[:-1])
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {rows}")
        stride = tensor.nbytes // rows
        return file.read(tensor.offset + start * stride, (stop - start) * stride)


class GgufHeaders(GgufSource):
    """The headers of a GGUF model whose weights need not be there: for plans, not for conversions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, whole=False)

    def quantized(self, name: str, start: int, stop: int) -> QuantizedRows | None:
        """In which format a tensor can be kept: that does not depend on its values, so these are zeros."""
        tensor, _ = self._find(name)
        stride = tensor.nbytes // prod(tensor.shape[:-1])
        return quantized_rows(tensor.type.name, np.zeros((stop - start) * stride, np.uint8), stop - start)


def _open_parts(path: Path, whole: bool) -> list[tuple[CheckpointFile, GgufHeader]]:
    file = CheckpointFile(path)
    header = parse_gguf(file, whole=whole)
    count = header.metadata.get("split.count", 0)
    named = PART_NAME.fullmatch(path.name)
    if not isinstance(count, int):
        raise FileFormatError(f"{path}: split.count is {shown(count)}, not a number")
    if named and int(named["count"]) != max(count, 1):
        raise FileFormatError(
            f"{path}: the name says {int(named['count'])} parts, split.count says {count}",
            remedy="give the file the name it was published under",
        )
    if count <= 1:
        return [(file, header)]
    if not named:
        raise IncompleteError(
            f"{path}: one of {count} parts, but the name has no -0000N-of-{count:05d} to find the others",
            remedy="give all parts the names they were published under",
        )
    parts = _part_paths(path, named["stem"], count)
    opened = [(file, header) if part == path else _open(part, whole) for part in parts]
    _check_split(opened)
    return opened


def _open(path: Path, whole: bool) -> tuple[CheckpointFile, GgufHeader]:
    file = CheckpointFile(path)
    return file, parse_gguf(file, whole=whole)


def _part_paths(path: Path, stem: str, count: int) -> list[Path]:
    names = [f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise IncompleteError(
            f"{path}: {len(missing)} of {count} parts are missing: {listed(missing)}",
            remedy="incomplete download? Put all parts into one directory",
        )
    return [path if name == path.name else inside(path.parent, name, "part") for name in names]


def _check_split(opened: list[tuple[CheckpointFile, GgufHeader]]) -> None:
    for index, (file, header) in enumerate(opened):
        number, count = header.metadata.get("split.no"), header.metadata.get("split.count")
        if (number, count) != (index, len(opened)):
            raise FileFormatError(
                f"{file.path}: says split.no {shown(number)} of split.count {shown(count)}, "
                f"its name says {index} of {len(opened)}",
                remedy="the parts belong to different models or were renamed; " + DOWNLOAD_AGAIN,
            )
    promised = opened[0][1].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for _, header in opened)
    if promised is not None and promised != found:
        raise IncompleteError(
            f"{opened[0][0].path}: split.tensors.count says {shown(promised)}, the parts hold {found}",
            remedy=DOWNLOAD_AGAIN,
        )


def _merge(opened: list[tuple[CheckpointFile, GgufHeader]]) -> dict[str, tuple[GgufTensor, CheckpointFile]]:
    merged: dict[str, tuple[GgufTensor, CheckpointFile]] = {}
    for file, header in opened:
        for name, tensor in header.tensors.items():
            if name in merged:
                raise FileFormatError(
                    f"tensor {shown(name)} is both in {merged[name][1].path} and in {file.path}",
                    remedy="the parts belong to different models; fetch them again",
                )
            merged[name] = (tensor, file)
    return merged
