"""The host emulator of csrc/emu: g++ compiles a kernel file as it is, ctypes launches it.

Two builds: `checked` sees every memory access (out of bounds, races, uninitialised shared memory ...; see
docs/kernels.md), `fast` is for running whole models. Needs g++ and a checkout (csrc/emu is not installed).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from strata.backends.cuda.compile_cache import default_folder
from strata.backends.cuda.sources import KernelSource
from strata.errors import HardwareError, StrataError

Order = Literal["forward", "reverse", "random"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
Scalar = int | float

_CSRC = Path(__file__).resolve().parents[3] / "csrc"
_COMMON = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique"]
_RUNTIME = [*_COMMON, "-g", "-O1", "-Wall", "-Wextra"]
_KERNEL = [
    *_COMMON,
    "-DSTRATA_EMULATED",
    "-Wall",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    "-x",
    "c++",
]
_FAST = ["-Og"]  # -O1 compiles twice as long, for 5 % of a small model's time
# -O0: what the optimizer removes cannot be checked. -g: errors name a line.
_CHECKED = [
    "-O0",
    "-g",
    "-fsanitize=thread,alignment,bounds,shift",
    "--param",
    "tsan-instrument-func-entry-exit=0",
]
_PC = re.compile(r"pc (0x[0-9a-f]+)")


class EmulatorError(StrataError):
    """A kernel did what it must not do; the cause names the check, the place and the thread."""


@dataclass(frozen=True)
class GlobalBuffer:
    """A range of memory that a launch may touch."""

    address: int
    nbytes: int
    read_only: bool
    name: str


class EmulatedKernels:
    """The kernels of one file. One launch at a time per object's library."""

    def __init__(self, library: Path, checked: bool, order: Order = "forward", seed: int = 0) -> None:
        self._path = library
        self._library = ctypes.CDLL(str(library))
        self._library.strata_emu_error.restype = ctypes.c_char_p
        self._library.strata_emu_add_buffer.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_char_p,
        )
        self._settings = (int(checked), ORDERS.index(order), seed)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        arguments: Sequence[ctypes.c_void_p | ctypes.c_int | ctypes.c_float],
        buffers: Sequence[GlobalBuffer],
    ) -> None:
        """Run the grid; EmulatorError when a check fires. `arguments` are as the kernel declares them."""
        self._library.strata_emu_configure(*self._settings)
        self._library.strata_emu_clear_buffers()
        for buffer in buffers:
            self._library.strata_emu_add_buffer(
                buffer.address, buffer.nbytes, int(buffer.read_only), buffer.name.encode()
            )
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        status = self._library.strata_emu_launch(
            name.encode(),
            _sizes(grid),
            _sizes(block),
            ctypes.c_size_t(shared_bytes),
            addresses,
            len(arguments),
        )
        if status != 0:
            raise EmulatorError(f"{name}: {self._with_lines(self._library.strata_emu_error().decode())}")

    def _with_lines(self, message: str) -> str:
        """The addresses in kernel code replaced by file and line, inlined callers included."""
        found = _PC.search(message)
        if found is None or shutil.which("addr2line") is None:
            return message
        offset = int(found[1], 16) - self._base() - 1  # the call, not the return address
        command = ["addr2line", "-i", "-s", "-e", str(self._path), hex(offset)]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        places = [line.split(" ")[0] for line in lines if line and not line.startswith("kernel_side.h")]
        return message.replace(found[0], "at " + " <- ".join(places[:3])) if places else message

    def _base(self) -> int:
        with Path("/proc/self/maps").open(encoding="utf-8") as maps:
            return next(int(line.split("-")[0], 16) for line in maps if str(self._path) in line)


def _sizes(three: Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*three, *(1,) * (3 - len(three)))


def build_emulated(source: KernelSource, checked: bool, folder: Path | None = None) -> Path:
    """The shared library of one kernel file, built unless the same content was built before."""
    folder = folder or default_folder() / "emulated"
    flags = [*_KERNEL, *(_CHECKED if checked else _FAST)]
    inputs = [source.name, source.text, *source.headers.values(), *flags, _runtime_key()]
    library = folder / f"{Path(source.name).stem}-{_digest(inputs)}.so"
    if library.is_file():
        return library
    runtime = _build_runtime(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in {source.name: source.text, **source.headers}.items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        made = Path(scratch) / "kernel.o"
        _compile([*flags, f"-I{_CSRC}", "-c", str(Path(scratch) / source.name), "-o", str(made)])
        _publish(library, ["-shared", str(made), str(runtime)])
    return library


def _build_runtime(folder: Path) -> Path:
    """The emulator's runtime as one object, compiled in one go: most of the time goes into headers."""
    made = folder / f"runtime-{_runtime_key()}.o"
    if not made.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            unit = Path(scratch) / "runtime.cpp"
            files = sorted((_CSRC / "emu").glob("*.cpp"))
            unit.write_text("".join(f'#include "emu/{path.name}"\n' for path in files), encoding="utf-8")
            _publish(made, [*_RUNTIME, f"-I{_CSRC}", "-c", str(unit)])
    return made


@lru_cache(maxsize=1)
def _runtime_key() -> str:
    folder = _CSRC / "emu"
    if not folder.is_dir():
        raise HardwareError(
            "the emulator's sources (csrc/emu) are not installed",
            remedy="pip install -e . in a checkout of Strata",
        )
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())]
    return _digest([*texts, *_RUNTIME])


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _publish(target: Path, arguments: list[str]) -> None:
    """Build under a temporary name, then rename: another process sees the whole file or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        _compile([*arguments, "-o", str(made)])
        made.replace(target)


def _compile(arguments: list[str]) -> None:
    if shutil.which("g++") is None:
        raise HardwareError("the emulator needs g++, which is not installed", remedy="install g++")
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"g++ refuses the code:\n{done.stderr[:4000]}")
