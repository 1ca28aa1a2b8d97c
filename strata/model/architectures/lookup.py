"""Tensors of a checkpoint by name: presence and shape are checked, unused ones are noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.errors import FileFormatError, IncompleteError
from strata.store.source import SourceRows, TensorInfo


class Lookup:
    """Hands out SourceRows and remembers the tensors they came from in `used`."""

    def __init__(self, tensors: Mapping[str, TensorInfo], source: str) -> None:
        self.tensors = tensors
        self.source = source
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.tensors

    def dtype(self, name: str) -> str:
        """dtype of a tensor that is there."""
        return self.tensors[name].dtype

    def take(self, name: str, shape: tuple[int, ...], **block: Any) -> SourceRows:
        """A block of tensor `name`, which must have `shape` (dimensions of 1 aside).

        Raises IncompleteError when it is missing, FileFormatError when the shapes disagree.
        """
        info = self.tensors.get(name)
        if info is None:
            raise IncompleteError(
                f"{self.source}: tensor {name} is missing",
                remedy="the download may be incomplete: fetch it again",
            )
        if _without_ones(info.shape) != _without_ones(shape):
            raise FileFormatError(
                f"{self.source}: tensor {name} has shape {list(info.shape)}, the model needs {list(shape)}"
            )
        self.used.add(name)
        return SourceRows(name, **block)


class Promise(Lookup):
    """A checkpoint that is not there: it has whatever is asked for, in BF16."""

    def has(self, name: str) -> bool:
        """Always."""
        return True

    def dtype(self, name: str) -> str:
        """As published, unquantized."""
        return "BF16"

    def take(self, name: str, shape: tuple[int, ...], **block: Any) -> SourceRows:
        """The block, whatever it is."""
        return SourceRows(name, **block)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
