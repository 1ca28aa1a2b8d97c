"""Compiled kernels as the device layer launches them: in the emulator, or (never run so far) on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from strata.backends.cuda.compile_cache import CompileCache
from strata.backends.cuda.emulator import EmulatedKernels, GlobalBuffer, build_emulated
from strata.backends.cuda.nvrtc import load_nvrtc
from strata.backends.cuda.sources import KernelSource, kernel_source
from strata.device.base import Buffer, ByValue, Kernel, Launch

Sources = Callable[[str], KernelSource]


class Address(int):
    """An argument that is a pointer and not a buffer: NULL."""


NULL = Address(0)


class KernelLoader(Protocol):
    """Gives kernels by file and entry, compiling a file when it is first asked for."""

    def kernel(self, file: str, entry: str) -> Kernel:
        """The same object for the same question."""
        ...


@dataclass(frozen=True)
class EmulatedKernel:
    """One entry of a file that runs in the emulator. It sees what its launch names, if it is checked."""

    name: str
    library: EmulatedKernels

    def run(self, launch: Launch, stream: int) -> None:
        """Compute at once. EmulatorError when a check fires."""
        arguments = [_emulated(value) for value in launch.arguments]
        self.library.launch(
            self.name, launch.grid, launch.block, launch.shared_bytes, arguments, _ranges(launch)
        )


class EmulatedLoader:
    """Kernels for the emulated device; needs g++. checked: see every access, some ten times slower. source:
    where a file's text comes from."""

    def __init__(self, checked: bool = False, source: Sources = kernel_source) -> None:
        self._checked = checked
        self._source = source
        self._libraries: dict[str, EmulatedKernels] = {}

    def kernel(self, file: str, entry: str) -> Kernel:
        """Builds the file's library at first."""
        if file not in self._libraries:
            path = build_emulated(self._source(file), self._checked)
            self._libraries[file] = EmulatedKernels(path, self._checked)
        return EmulatedKernel(entry, self._libraries[file])


@dataclass(frozen=True)
class GpuKernel:
    """One entry of a loaded module: `function` is cupy's. Written, not yet run on hardware."""

    name: str
    function: Any
    streams: Any

    def run(self, launch: Launch, stream: int) -> None:
        """Enqueue on the raw stream."""
        arguments = tuple(_native(value) for value in launch.arguments)
        with self.streams.ExternalStream(stream):
            self.function(launch.grid, launch.block, arguments, shared_mem=launch.shared_bytes)


class GpuLoader:
    """Kernels for a GPU, compiled by NVRTC for its architecture. Written, not yet run on hardware."""

    def __init__(self, arch: str, source: Sources = kernel_source) -> None:
        import cupy

        self._source = source
        self._cupy = cupy
        self._cache = CompileCache(load_nvrtc(), arch)
        self._modules: dict[str, Any] = {}

    def kernel(self, file: str, entry: str) -> Kernel:
        """Loads the file's machine code at first."""
        if file not in self._modules:
            path = self._cache.cubin_file(self._source(file))
            self._modules[file] = self._cupy.RawModule(path=str(path))
        function = self._modules[file].get_function(entry)
        function.max_dynamic_shared_size_bytes = 99 << 10
        return GpuKernel(entry, function, self._cupy.cuda)


def _emulated(value: Buffer | ByValue | int | float) -> Any:
    if isinstance(value, ByValue):
        return (ctypes.c_uint8 * len(value.data)).from_buffer_copy(value.data)
    if isinstance(value, Buffer):
        return ctypes.c_void_p(value.address)
    if isinstance(value, Address):
        return ctypes.c_void_p(int(value))
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


def _native(value: Buffer | ByValue | int | float) -> Any:
    """cupy takes numpy's scalars by their size, an array of one element as a struct; a pointer is a u64."""
    import numpy as np

    if isinstance(value, ByValue):
        return np.frombuffer(value.data, f"V{len(value.data)}")
    if isinstance(value, Buffer):
        return np.uint64(value.address)
    if isinstance(value, Address):
        return np.uint64(int(value))
    return np.float32(value) if isinstance(value, float) else np.int32(value)


def _ranges(launch: Launch) -> list[GlobalBuffer]:
    """What the launch names; a range that is read and written is writable."""
    writable = {(buffer.address, buffer.nbytes): buffer for buffer in launch.writes}
    only_read = {
        key: buffer for buffer in launch.reads if (key := (buffer.address, buffer.nbytes)) not in writable
    }
    named = [(key, buffer, False) for key, buffer in writable.items()]
    named += [(key, buffer, True) for key, buffer in only_read.items()]
    return [GlobalBuffer(*key, read_only, str(buffer)) for key, buffer, read_only in named]
