"""setup.py's way of compiling, for programs that link some of the same files."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Job = tuple[Path, list[str], Path]
"""A source file, flags, and the folder for its object."""


@dataclass(frozen=True)
class Setup:
    """What setup.py says: compile_all makes the objects that are not up to date, and returns all of them.

    groups: (name, sources, flags). objects: the folder of the extension's own. Paths are relative to ROOT.
    """

    compile_all: Callable[[list[Job]], list[Path]]
    groups: Sequence[tuple[str, list[Path], list[str]]]
    objects: Path
    avx512: list[str]

    @classmethod
    def read(cls) -> Setup:
        """Nothing is built or installed by it."""
        names: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
        return cls(names["compile_all"], names["groups"](), names["OBJECTS"], names["AVX512"])

    def group(self, name: str) -> tuple[list[Path], list[str]]:
        """Sources and flags of one group."""
        return next((sources, flags) for known, sources, flags in self.groups if known == name)

    def jobs(self, name: str) -> list[Job]:
        """The objects of a group as the extension has them."""
        sources, flags = self.group(name)
        return [(source, flags, self.objects / name) for source in sources]


def link(objects: Sequence[Path], program: Path, *flags: str) -> Path:
    """RuntimeError: the linker's message."""
    command = ["g++", *flags, *map(str, objects), "-pthread", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program}: not linked\n{done.stderr[-3000:]}")
    return program
