"""Where the kernels' sources lie, and what a kernel file consists of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from strata.errors import HardwareError

_INCLUDE = re.compile(r'^#include "([\w./]+)"', re.MULTILINE)
_HERE = Path(__file__).resolve().parent
_FOLDERS = (_HERE / "kernels", _HERE.parents[2] / "csrc" / "cuda")  # installed; a checkout


@dataclass(frozen=True)
class KernelSource:
    """One `.cu` file and every header of the same folder that it includes, directly or not."""

    name: str
    text: str
    headers: dict[str, str]


def kernel_folder() -> Path:
    """The folder of `.cu` files: beside this module when installed, csrc/cuda in a checkout."""
    for folder in _FOLDERS:
        if (folder / "device.cuh").is_file():
            return folder
    raise HardwareError(
        f"the CUDA kernels' sources are neither in {_FOLDERS[0]} nor in {_FOLDERS[1]}",
        remedy="install Strata again: the files belong to the package",
    )


def kernel_source(name: str, folder: Path | None = None) -> KernelSource:
    """The source of `<name>.cu`; headers that only the emulator knows (emu/...) are left out."""
    folder = folder or kernel_folder()
    text = (folder / f"{name}.cu").read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        header = waiting.pop()
        path = folder / header
        if header not in headers and path.is_file():
            headers[header] = path.read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(headers[header])
    return KernelSource(f"{name}.cu", text, headers)


@lru_cache(maxsize=1)
def kernel_names() -> tuple[str, ...]:
    """Every kernel file, without its suffix."""
    return tuple(sorted(path.stem for path in kernel_folder().glob("*.cu")))
