"""One launch, three ways to run it: the emulator (checked or fast) and, in ptxsim, the compiled PTX.

Arrays are copied into buffers of their own, 256-byte aligned as device memory is, with a red zone of 4 KiB on
either side; read-only arrays become read-only buffers. Outputs are copied back.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.backends.cuda.emulator import EmulatedKernels, GlobalBuffer, Order, build_emulated
from strata.backends.cuda.sources import KernelSource, kernel_folder, kernel_source

RED_ZONE, ALIGNMENT = 4096, 256
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pointers:
    """An argument that is an array of addresses: entry i points at the call's `reached[i]`, None is null."""

    targets: tuple[int | None, ...]


@dataclass(frozen=True)
class Words:
    """u32 that are handed over by value, as the kernel's struct of so many, or (far) in global memory. The
    first two words for each of `targets` are an address, as in Pointers."""

    values: np.ndarray
    targets: tuple[int, ...] = ()
    far: bool = False


Argument = np.ndarray | Pointers | Words | int | float | None


@dataclass(frozen=True)
class Call:
    """A launch with its arrays. None is a null pointer; a Python float an f32, an int an i32.

    reached: arrays that kernels find through Pointers.
    """

    file: str
    entry: str
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    reached: tuple[np.ndarray, ...] = ()


def resolved(call: Call, address: Callable[[int], int]) -> list[Argument]:
    """The arguments, then `reached`; Pointers become arrays of `address(index into this list)`."""
    first = len(call.arguments)

    def table(pointers: Pointers) -> np.ndarray:
        found = [0 if i is None else address(first + i) for i in pointers.targets]
        return read_only(np.array(found, np.uint64))

    def with_addresses(words: Words) -> Argument:
        values = words.values.copy()
        found = np.array([address(first + i) for i in words.targets], np.uint64)
        values[: 2 * len(found)] = found.view(np.uint32)
        return read_only(values) if words.far else Words(values)

    def told(argument: Argument) -> Argument:
        if isinstance(argument, Pointers):
            return table(argument)
        return with_addresses(argument) if isinstance(argument, Words) else argument

    return [*map(told, call.arguments), *call.reached]


def made_arrays(call: Call, values: Sequence[Argument]) -> list[int]:
    """Indices of the arguments that became arrays when addresses were known."""
    made = zip(call.arguments, values, strict=False)
    return [i for i, (a, v) in enumerate(made) if isinstance(v, np.ndarray) and not isinstance(a, np.ndarray)]


def read_only(array: Any) -> np.ndarray:
    """A copy that kernels may not write."""
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def unwritten(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """An output before its kernel: every byte 0xff, which is NaN in every float format."""
    return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


@cache
def source_of(file: str) -> KernelSource:
    """A kernel of csrc/cuda, or one of this folder's."""
    local = HERE / f"{file}.cu"
    if not local.is_file():
        return kernel_source(file)
    headers = ("device.cuh", "last_block.cuh")
    texts = {name: (kernel_folder() / name).read_text(encoding="utf-8") for name in headers}
    return KernelSource(local.name, local.read_text(encoding="utf-8"), texts)


class EmulatedRunner:
    """Runs calls in the emulator. Skips where there is no compiler."""

    def __init__(self, order: Order = "forward", checked: bool = True, seed: int = 1) -> None:
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++, which is not installed")
        self._settings = (checked, order, seed)

    def run(self, call: Call, source: KernelSource | None = None) -> None:
        """Outputs are in the call's arrays afterwards."""
        checked, order, seed = self._settings
        library = build_emulated(source or source_of(call.file), checked)
        kernels = EmulatedKernels(library, checked, order, seed)
        everything = [*call.arguments, *call.reached]
        buffers = [Padded(i, a) for i, a in enumerate(everything) if isinstance(a, np.ndarray)]
        by_index = {buffer.index: buffer for buffer in buffers}
        values = resolved(call, lambda i: by_index[i].range.address)
        tables = [Padded(i, values[i]) for i in made_arrays(call, values)]
        buffers += tables
        by_index |= {buffer.index: buffer for buffer in tables}
        arguments = [_argument(i, a, by_index) for i, a in enumerate(values[: len(call.arguments)])]
        ranges = [buffer.range for buffer in buffers]
        kernels.launch(call.entry, call.grid, (call.block,), call.shared_bytes, arguments, ranges)
        for buffer in buffers:
            buffer.copy_back()


class Padded:
    """An array's copy inside red zones."""

    def __init__(self, index: int, array: np.ndarray) -> None:
        self.index, self.array = index, array
        assert array.flags.c_contiguous
        self._all = np.full(array.nbytes + 2 * RED_ZONE + ALIGNMENT, 0xA5, np.uint8)
        begin = RED_ZONE + -(self._all.ctypes.data + RED_ZONE) % ALIGNMENT
        self._inside = self._all[begin : begin + array.nbytes]
        self._inside[:] = array.reshape(-1).view(np.uint8)
        address = self._inside.ctypes.data
        self.range = GlobalBuffer(address, array.nbytes, not array.flags.writeable, f"argument {index}")

    def copy_back(self) -> None:
        if self.array.flags.writeable:
            self.array.reshape(-1).view(np.uint8)[:] = self._inside


def _argument(index: int, value: Argument, buffers: dict[int, Padded]) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(buffers[index].range.address)
    if isinstance(value, Words):
        return (ctypes.c_uint32 * len(value.values))(*value.values.tolist())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)
