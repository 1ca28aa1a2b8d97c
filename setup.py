"""Builds `strata._C`: one extension, three groups of objects with different instruction sets.

- plain: `bindings*.cpp`, `features.cpp` and `io/` run on any x86-64, so that a processor without AVX2 is told
  so in a sentence; they stand first on the linker's line, so a template instantiated in several groups is
  taken from the group that needs least.
- avx2: everything else (haswell: AVX2, FMA, F16C, BMI2).
- kernels: every file of `csrc/cpu/kernels/` twice, in the namespaces `avx2` and `avx512`.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")


def sources(pattern: str) -> list[Path]:
    """C++ files, relative to this folder, as every path here is."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / CSRC).glob(pattern))


PLAIN_SOURCES = [*sources("bindings*.cpp"), *sources("io/*.cpp"), CSRC / "cpu" / "features.cpp"]

COMMON = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off", "-g0", "-fPIC"]
COMMON += ["-pthread", "-MMD"]
# Bindings check arguments and call: optimizing pybind11's templates took most of the build.
PLAIN = ["-march=x86-64", "-mtune=generic", "-O1"]
AVX2 = ["-march=haswell", "-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
AVX512 += ["-mtune=icelake-server", "-mprefer-vector-width=512"]
# GCC 12 reorders integer additions and then spills the accumulators of a tile without the first flag; its
# own AVX-512 headers trip over the warnings that the others turn off.
KERNEL = ["-fno-tree-reassoc", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-fno-exceptions"]
MOST_JOBS = 8
"""Compilers side by side, however many CPUs there are: each needs up to 700 MB."""
OBJECTS = Path("build") / "objects"
"""Not the temporary folder that pip gives: an object that is up to date serves every later installation."""


def kernel_sources() -> list[Path]:
    """Files compiled once per instruction set."""
    return sources("cpu/kernels/*.cpp")


def avx2_sources() -> list[Path]:
    """Files compiled once, for the AVX2 baseline."""
    return [path for path in sources("cpu/*.cpp") if path not in PLAIN_SOURCES]


def groups() -> list[tuple[str, list[Path], list[str]]]:
    """(name, sources, flags) in link order."""
    return [
        ("plain", PLAIN_SOURCES, [*COMMON, *PLAIN]),
        ("avx2", avx2_sources(), [*COMMON, *AVX2]),
        ("kernels_avx2", kernel_sources(), [*COMMON, *AVX2, *KERNEL, "-DSTRATA_ISA=avx2"]),
        ("kernels_avx512", kernel_sources(), [*COMMON, *AVX512, *KERNEL, "-DSTRATA_ISA=avx512"]),
    ]


class BuildGroups(build_ext):
    """Compiles each group with its own flags; an object newer than all it may depend on is kept."""

    def build_extension(self, ext: Extension) -> None:
        """Compile what changed, then link."""
        if platform.machine() not in ("x86_64", "AMD64"):
            sys.exit(f"strata needs an x86-64 processor with AVX2; this is {platform.machine()}")
        python = [f"-I{path}" for path in (*ext.include_dirs, sysconfig.get_path("include"))]
        jobs = [
            # Where pip unpacks pybind11 changes every time, and with it the flags of what reads it.
            (source, [*flags, *(python if name == "plain" else [])], OBJECTS / name)
            for name, files, flags in groups()
            for source in files
        ]
        objects = [str(built) for built in compile_all(jobs)]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), target_lang="c++", extra_postargs=["-pthread"])


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


def compile_all(jobs: list[tuple[Path, list[str], Path]]) -> list[Path]:
    """Object files of (source, flags, folder for the object), several compilers at a time. Processes that
    compile in this tree take turns: they may want the same objects."""
    lock = ROOT / OBJECTS.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file, ThreadPoolExecutor(min(MOST_JOBS, os.cpu_count() or 1)) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        return list(pool.map(lambda job: compile_one(*job), jobs))


def compile_one(source: Path, flags: list[str], folder: Path) -> Path:
    """One object file; it is kept while it is newer than all it was made from and its flags are the same.

    The compiler is called as it is: the flags that came with Python differ from one build of it to the next.
    """
    built = ROOT / folder / f"{source.parent.name}-{source.stem}.o"
    command = [*compiler(), *flags, f"-I{CSRC}", "-c", str(source), "-o", str(built)]
    said = built.with_suffix(".command")
    same = said.exists() and said.read_text(encoding="utf-8") == " ".join(command)
    if same and built.exists() and built.stat().st_mtime > newest_input(built):
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"{source}: the compiler failed:\n{done.stderr[-3000:]}")
    said.write_text(" ".join(command), encoding="utf-8")
    return built


def compiler() -> list[str]:
    """$CXX, or g++."""
    command = os.environ.get("CXX", "g++").split()
    if not command or shutil.which(command[0]) is None:
        raise RuntimeError(f"the C++ compiler {' '.join(command)!r} is not here: install g++")
    return command


def newest_input(built: Path) -> float:
    """Modification time of the newest file that an object was made from (GCC's -MMD lists them)."""
    listed = built.with_suffix(".d")
    if not listed.exists():
        return float("inf")
    inputs = listed.read_text(encoding="utf-8").split(":", 1)[1].replace("\\\n", " ").split()
    paths = [ROOT / name for name in inputs]
    return max(path.stat().st_mtime if path.exists() else float("inf") for path in paths)


def extension() -> Extension:
    """`strata._C` with every source listed (source distributions need the list)."""
    import pybind11

    files = [str(path) for path in (*PLAIN_SOURCES, *avx2_sources(), *kernel_sources())]
    return Extension("strata._C", sources=files, include_dirs=[pybind11.get_include()], language="c++")


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        packages=find_packages(include=["strata", "strata.*"]),
        ext_modules=[extension()],
        cmdclass={"build_ext": BuildGroups, "build_py": CopyKernels},
    )
