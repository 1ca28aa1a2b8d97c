"""Compiled kernels on disk: a kernel is compiled once per source, options, NVRTC version and architecture.

An entry is one file named after the key: a line of JSON (sizes and checksum), then PTX, machine code and log.
Entries are written under a temporary name and renamed, so that readers see whole entries only; one whose
checksum is wrong counts as absent and is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from strata.backends.cuda.nvrtc import Compiled, Nvrtc
from strata.backends.cuda.sources import KernelSource

OPTIONS = ("-std=c++17", "--ptxas-options=-v", "-lineinfo")
DEFAULT_ARCH = "sm_86"
_PARTS = ("ptx", "cubin", "log")


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/strata/kernels`, by default under ~/.cache; may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "strata" / "kernels"


class CompileCache:
    """Compiles through a folder of results. arch: e.g. "sm_86", the GPU's own."""

    def __init__(self, nvrtc: Nvrtc, arch: str = DEFAULT_ARCH, folder: Path | None = None) -> None:
        self.nvrtc = nvrtc
        self.arch = arch
        self.folder = folder or default_folder()

    def compile(self, source: KernelSource, extra_options: Sequence[str] = ()) -> Compiled:
        """From the folder, else from the compiler (and then into the folder, if it can be written)."""
        options = (f"-arch={self.arch}", *OPTIONS, *extra_options)
        path = self.folder / f"{self.key(source, options)}.kernel"
        found = _read(path)
        if found is None:
            found = self.nvrtc.compile(source, options)
            _write(path, found)
        return found

    def cubin_file(self, source: KernelSource) -> Path:
        """The machine code alone, as a file beside the entry: what a driver's loader takes."""
        key = self.key(source, (f"-arch={self.arch}", *OPTIONS))
        path = self.folder / f"{key}.cubin"
        cubin = self.compile(source).cubin
        if not path.is_file() or path.read_bytes() != cubin:
            _write_whole(path, cubin)
        return path

    def key(self, source: KernelSource, options: Sequence[str]) -> str:
        """Everything that the result depends on, hashed; the architecture is one of the options."""
        what = (source.name, source.text, sorted(source.headers.items()), list(options), self.nvrtc.version)
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _read(path: Path) -> Compiled | None:
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        sizes = [int(header["sizes"][part]) for part in _PARTS]
        is_whole = header["sha256"] == hashlib.sha256(body).hexdigest() and sum(sizes) == len(body)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_whole:
        return None
    ptx, rest = body[: sizes[0]], body[sizes[0] :]
    return Compiled(ptx.decode(), rest[: sizes[1]], rest[sizes[1] :].decode())


def _write(path: Path, compiled: Compiled) -> None:
    """A cache that cannot be written (a full or read-only disk) costs time, not the run."""
    parts = (compiled.ptx.encode(), compiled.cubin, compiled.log.encode())
    body = b"".join(parts)
    sizes = dict(zip(_PARTS, map(len, parts), strict=True))
    header = json.dumps({"sizes": sizes, "sha256": hashlib.sha256(body).hexdigest()})
    try:
        _write_whole(path, header.encode() + b"\n" + body)
    except OSError:
        return


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
