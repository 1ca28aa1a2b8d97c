"""NVIDIA's run-time compiler through ctypes, from the wheel `nvidia-cuda-nvrtc-cu12`: no toolkit, no driver.

Only NVRTC 12.x is taken: machine code of 13.x wants drivers that old machines do not have, that of 12.x runs
with driver 525 and newer (NVIDIA, "CUDA Compatibility", minor version compatibility).
Reference: NVIDIA, "NVRTC", 12.x.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from strata.backends.cuda.sources import KernelSource
from strata.errors import HardwareError, StrataError

MAJOR = 12
_LIBRARY = f"libnvrtc.so.{MAJOR}"
_REMEDY = "pip install 'strata-moe[gpu]'"
_ERROR_LINE = re.compile(r"^(?P<file>[\w./]+)\((?P<line>\d+)\): (catastrophic )?error:", re.MULTILINE)


class KernelCompileError(StrataError):
    """A kernel does not compile. kernel: its file; line: of the first error, 0 if unknown; log: all."""

    def __init__(self, kernel: str, line: int, where: str, log: str) -> None:
        super().__init__(f"{kernel} does not compile, first error at {where}:\n{log.strip()}")
        self.kernel = kernel
        self.line = line
        self.log = log


@dataclass(frozen=True)
class Compiled:
    """What a compilation gave: machine code for one architecture, the PTX it was made from, ptxas' words."""

    ptx: str
    cubin: bytes
    log: str


class Nvrtc:
    """The loaded library. version: (major, minor)."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise HardwareError(f"NVRTC cannot be loaded: {error}", remedy=_REMEDY) from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def compile(self, source: KernelSource, options: Sequence[str]) -> Compiled:
        """Compile one file; KernelCompileError when it is wrong."""
        program = self._create(source)
        try:
            values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), values)
            log = self._text(program, "ProgramLog")
            if status != 0:
                raise _compile_error(source, log)
            return Compiled(self._text(program, "PTX"), self._bytes(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _create(self, source: KernelSource) -> ctypes.c_void_p:
        program, count = ctypes.c_void_p(), len(source.headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for text in source.headers.values()))
        names = (ctypes.c_char_p * count)(*(name.encode() for name in source.headers))
        status = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.text.encode(), source.name.encode(), count, texts, names
        )
        self._check("nvrtcCreateProgram", status)
        return program

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(what, getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(what, getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode()

    def _check(self, what: str, status: int) -> None:
        if status == 0:
            return
        function = self._library.nvrtcGetErrorString
        function.restype = ctypes.c_char_p
        raise HardwareError(f"NVRTC's {what} failed: {function(status).decode()}", remedy=_REMEDY)


def _compile_error(source: KernelSource, log: str) -> KernelCompileError:
    found = _ERROR_LINE.search(log)
    if found is None:
        return KernelCompileError(source.name, 0, "an unknown line", log)
    name, line = found["file"], int(found["line"])
    text = {source.name: source.text, **source.headers}.get(name, "")
    quoted = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
    return KernelCompileError(source.name, line, f"{name}, line {line}: `{quoted}`", log)


@lru_cache(maxsize=1)
def load_nvrtc() -> Nvrtc:
    """The installed NVRTC 12.x; HardwareError with the command that installs it."""
    return Nvrtc(_library_path())


def _library_path() -> Path:
    for folder in _wheel_folders():
        path = folder / "lib" / _LIBRARY
        if path.is_file():
            return path
    raise HardwareError(f"NVRTC {MAJOR}.x ({_LIBRARY}) is not installed", remedy=_REMEDY)


def _wheel_folders() -> list[Path]:
    try:
        spec: Any = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
