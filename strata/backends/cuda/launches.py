"""Launches out of shapes, arguments and the ranges that kernels touch."""

from __future__ import annotations

from collections.abc import Sequence

from strata.backends.cuda.kernels import NULL, KernelLoader
from strata.backends.cuda.launch_shapes import LaunchShape
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import work_of
from strata.device.base import Buffer, ByValue, Launch
from strata.errors import UnsupportedError

Operand = Buffer | ByValue | int | float


class Launcher:
    """Makes launches of kernels that a loader gives. tickets: see `KernelSet.use_tickets`."""

    def __init__(self, loader: KernelLoader) -> None:
        self._loader = loader
        self.tickets: Buffer | None = None

    def tickets_for(self, count: int) -> Buffer | None:
        """The first `count`, None when there are not so many."""
        if self.tickets is None or 4 * count > self.tickets.nbytes:
            return None
        return self.tickets.slice(0, 4 * count)

    def make(
        self,
        shape: LaunchShape,
        arguments: Sequence[Operand],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        macs: int = 0,
    ) -> Launch:
        """The launch, whose work is every named range once."""
        return Launch(
            self._loader.kernel(shape.file, shape.entry),
            tuple(reads),
            tuple(writes),
            work_of(reads, writes, macs),
            tuple(arguments),
            shape.grid,
            (shape.block, 1, 1),
            shape.shared_bytes,
        )


def or_null(matrix: Matrix | None) -> Operand:
    """A matrix's buffer, or a null pointer."""
    return NULL if matrix is None else matrix.buffer


def require_multiple(op: str, what: str, value: int, multiple: int) -> None:
    """UnsupportedError: a kernel's vectors would not be aligned."""
    if value % multiple:
        raise UnsupportedError(
            f"{op} on a GPU: {value} {what} are no multiple of {multiple}", remedy="use device.use: none"
        )
