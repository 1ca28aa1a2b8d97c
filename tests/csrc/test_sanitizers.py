"""C++ under sanitizers, and what the objects of each instruction set may contain. Needs g++."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from strata.backends.isa import extension

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "csrc" / "cpu"
HERE = Path(__file__).parent
COMMON = ["-std=c++17", f"-I{ROOT / 'csrc'}", "-march=haswell", "-g1", "-pthread"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
OPS = [
    CPU / f"{name}.cpp"
    for name in ("formats", "thread_pool", "linear", "activations", "experts", "grouping", "weight_path")
]
ATTENTION = [CPU / f"{name}.cpp" for name in ("attention", "attention_plan", "kv_append", "thread_pool")]

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64"),
]


def compile_with(*arguments: object) -> None:
    done = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def run(program: Path, *arguments: object) -> None:
    # The thread sanitizer of GCC 12 cannot place its shadow where newer kernels randomise addresses.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "ok\n", (done.stdout + done.stderr)[-3000:]


def test_ops_touch_only_their_own_memory(tmp_path: Path) -> None:
    kernels = sorted((CPU / "kernels").glob("*.cpp"))
    # -O0: optimizing the instrumented templates takes minutes and finds nothing more.
    flags = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSTRATA_ISA=avx2"]
    program = tmp_path / "kernels"
    compile_with(*COMMON, *flags, *OPS, *kernels, HERE / "kernels_driver.cpp", "-o", program)
    run(program)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_attention_touches_its_own_memory_without_races(tmp_path: Path, isa: str, sanitizer: str) -> None:
    if isa == "avx512" and not extension().features()["avx512"]:
        pytest.skip("the processor has no AVX-512")
    flags = ["-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-DSTRATA_ISA={isa}"]
    flags += AVX512 if isa == "avx512" else []
    program = tmp_path / "attention"
    sources = [*ATTENTION, CPU / "kernels" / "attention.cpp", HERE / "attention_driver.cpp"]
    compile_with(*COMMON, *flags, *sources, "-o", program)
    run(program)


def test_pool_has_no_races(tmp_path: Path) -> None:
    program = tmp_path / "pool"
    flags = ["-O1", "-fsanitize=thread"]
    compile_with(*COMMON, *flags, CPU / "thread_pool.cpp", HERE / "pool_driver.cpp", "-o", program)
    run(program)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_direct_reads_write_what_was_asked_for_without_races(tmp_path: Path, sanitizer: str) -> None:
    flags = ["-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    program = tmp_path / "reads"
    reader = ROOT / "csrc" / "io" / "direct_read.cpp"
    compile_with(*COMMON, *flags, reader, HERE / "direct_read_driver.cpp", "-o", program)
    run(program, tmp_path)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_kernels_share_no_symbols_between_instruction_sets(tmp_path: Path, isa: str) -> None:
    """A weak symbol could be taken from the AVX-512 objects and run where there is only AVX2; a constructor
    would run at import, before the processor is asked."""
    for source in sorted((CPU / "kernels").glob("*.cpp")):
        made = tmp_path / f"{source.stem}.o"
        # -O0 inlines nothing that it need not, so every function that could be shared shows.
        flags = ["-O0", "-fno-exceptions", f"-DSTRATA_ISA={isa}", *(AVX512 if isa == "avx512" else [])]
        compile_with(*COMMON, *flags, "-c", source, "-o", made)
        names = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True).stdout
        for line in names.splitlines():
            kind, name = line[17:18], line[19:]
            assert kind not in "WVuv", f"{source.name}: {name} is shared with other objects"
            assert "_GLOBAL__sub_I" not in name, f"{source.name}: runs code at import"
            assert kind not in "TDR" or f"::{isa}::" in name, f"{source.name}: {name} stands outside of {isa}"


def test_features_are_read_without_avx(tmp_path: Path) -> None:
    """What runs before the processor is known to have AVX2 holds no AVX instruction (they begin with "v")."""
    made = tmp_path / "features.o"
    compile_with(
        "-std=c++17", f"-I{ROOT / 'csrc'}", "-O3", "-march=x86-64", "-c", CPU / "features.cpp", "-o", made
    )
    command = ["objdump", "-d", "--no-show-raw-insn", made]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    operations = [line.split("\t")[1].split()[0] for line in listing if "\t" in line]
    assert "cpuid" in operations
    assert not [name for name in operations if name.startswith("v")]
