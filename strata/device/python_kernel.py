"""Python functions as kernels of the emulated device: they see the ranges that their launch names, only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.device.base import Launch
from strata.device.buffers import Buffer, Bytes
from strata.device.emulated_memory import bytes_of

Views = tuple[Bytes, ...]


@dataclass(frozen=True)
class PythonKernel:
    """Calls `function(reads, writes)` with one u8 array per range of the launch, reads being read-only."""

    name: str
    function: Callable[[Views, Views], None]

    def run(self, launch: Launch, stream: int) -> None:
        """Compute at once; `stream` has no meaning here."""
        self.function(tuple(map(_read_only, launch.reads)), tuple(map(bytes_of, launch.writes)))


def _read_only(buffer: Buffer) -> Bytes:
    view = bytes_of(buffer).view()
    view.flags.writeable = False
    return view
