"""Builds `strata._C`: one extension, three groups of objects with different instruction sets.

- plain: `bindings*.cpp`, `features.cpp` and `io/` run on any x86-64, so that a processor without AVX2 is told
  so in a sentence; they stand first on the linker's line, so a template instantiated in several groups is
  taken from the group that needs least.
- avx2: everything else (haswell: AVX2, FMA, F16C, BMI2).
- kernels: every file of `csrc/cpu/kernels/` twice, in the namespaces `avx2` and `avx512`.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")
PLAIN_SOURCES = [
    *sorted(CSRC.glob("bindings*.cpp")),
    *sorted(CSRC.glob("io/*.cpp")),
    CSRC / "cpu" / "features.cpp",
]

COMMON = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off", "-g0", "-MMD"]
PLAIN = ["-march=x86-64", "-mtune=generic"]
AVX2 = ["-march=haswell", "-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
AVX512 += ["-mtune=icelake-server", "-mprefer-vector-width=512"]
# GCC 12 reorders integer additions and then spills the accumulators of a tile without the first flag; its
# own AVX-512 headers trip over the warnings that the others turn off.
KERNEL = ["-fno-tree-reassoc", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-fno-exceptions"]
MAX_JOBS = 2


def kernel_sources() -> list[Path]:
    """Files compiled once per instruction set."""
    return sorted((CSRC / "cpu" / "kernels").glob("*.cpp"))


def avx2_sources() -> list[Path]:
    """Files compiled once, for the AVX2 baseline."""
    return sorted(path for path in CSRC.glob("cpu/*.cpp") if path not in PLAIN_SOURCES)


def groups() -> list[tuple[str, list[Path], list[str]]]:
    """(name, sources, flags) in link order."""
    return [
        ("plain", PLAIN_SOURCES, PLAIN),
        ("avx2", avx2_sources(), AVX2),
        ("kernels_avx2", kernel_sources(), [*AVX2, *KERNEL, "-DSTRATA_ISA=avx2"]),
        ("kernels_avx512", kernel_sources(), [*AVX512, *KERNEL, "-DSTRATA_ISA=avx512"]),
    ]


class BuildGroups(build_ext):
    """Compiles each group with its own flags; an object newer than all it may depend on is kept."""

    def build_extension(self, ext: Extension) -> None:
        """Compile what changed (at most two compilers at a time), then link."""
        if platform.machine() not in ("x86_64", "AMD64"):
            sys.exit(f"strata needs an x86-64 processor with AVX2; this is {platform.machine()}")
        jobs = [(src, name, flags) for name, sources, flags in groups() for src in sources]
        with ThreadPoolExecutor(min(MAX_JOBS, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(lambda job: self.compile_one(ext, *job), jobs))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), target_lang="c++", extra_postargs=["-pthread"])

    def compile_one(self, ext: Extension, source: Path, group: str, flags: list[str]) -> str:
        """One object file; its path."""
        folder = Path(self.build_temp) / group
        built = folder / source.with_suffix(".o")
        if built.exists() and built.stat().st_mtime > newest_input(built):
            return str(built)
        options = [*COMMON, *flags, "-pthread"]
        self.compiler.compile(
            [str(source)], str(folder), include_dirs=ext.include_dirs, extra_postargs=options
        )
        return str(built)


class CopyKernels(build_py):
    """Installs the CUDA sources beside the module that compiles them on the user's machine."""

    def run(self) -> None:
        """Copy after the Python files; a checkout reads csrc/cuda itself."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "strata" / "backends" / "cuda" / "kernels"
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted((CSRC / "cuda").glob("*.cu*")):
            self.copy_file(str(source), str(target / source.name))


def newest_input(built: Path) -> float:
    """Modification time of the newest file that an object was made from (GCC's -MMD lists them)."""
    listed = built.with_suffix(".d")
    if not listed.exists():
        return float("inf")
    inputs = listed.read_text(encoding="utf-8").split(":", 1)[1].replace("\\\n", " ").split()
    paths = [Path(name) for name in ("setup.py", *inputs)]
    return max(path.stat().st_mtime if path.exists() else float("inf") for path in paths)


def extension() -> Extension:
    """`strata._C` with every source listed (source distributions need the list)."""
    import pybind11

    sources = [str(path) for path in (*PLAIN_SOURCES, *avx2_sources(), *kernel_sources())]
    include = [str(CSRC), pybind11.get_include()]
    return Extension("strata._C", sources=sources, include_dirs=include, language="c++")


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        packages=find_packages(include=["strata", "strata.*"]),
        ext_modules=[extension()],
        cmdclass={"build_ext": BuildGroups, "build_py": CopyKernels},
    )
