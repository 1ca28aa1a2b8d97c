"""C++ under sanitizers, and what the objects of each instruction set may contain. Needs g++."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata.backends.isa import extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from compiling import ROOT, Job, Setup, link

CPU = Path("csrc") / "cpu"
HERE = Path("tests") / "csrc"
# -O0: optimizing the instrumented templates takes minutes and finds nothing more.
COMMON = ["-std=c++17", "-O0", "-g1", "-march=haswell", "-pthread", "-MMD"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
SANITIZERS = {"memory": "address,undefined", "threads": "thread"}

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(900),  # whoever comes first compiles for all; the others wait
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64"),
]


def build(kind: str, driver: str, isa: str, sources: Sequence[Path], kernels: str = "*.cpp") -> Path:
    """The program of a driver, some ops and the kernels of one instruction set. Its objects stay in a folder:
    those that are up to date are not compiled again."""
    setup, folder = Setup.read(), Path("build") / "sanitized" / kind
    flags = [*COMMON, f"-fsanitize={SANITIZERS[kind]}", "-fno-sanitize-recover=all"]
    special = [*flags, f"-DSTRATA_ISA={isa}", *(AVX512 if isa == "avx512" else [])]
    objects: list[Job] = [(source, flags, folder) for source in sources]
    objects += [
        (path.relative_to(ROOT), special, folder / isa) for path in (ROOT / CPU / "kernels").glob(kernels)
    ]
    objects.append((HERE / f"{driver}_driver.cpp", special, folder / isa))
    target = ROOT / folder / isa / driver
    return link(setup.compile_all(objects), target, f"-fsanitize={SANITIZERS[kind]}")


def ops() -> list[Path]:
    """Every op of csrc/cpu."""
    return Setup.read().group("avx2")[0]


def run(program: Path, *arguments: object) -> None:
    # The thread sanitizer of GCC 12 cannot place its shadow where newer kernels randomise addresses.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "ok\n", (done.stdout + done.stderr)[-3000:]


@pytest.fixture(params=["avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "avx512" and not extension().features()["avx512"]:
        pytest.skip("the processor has no AVX-512")
    return name


@pytest.mark.parametrize("driver", ["kernels", "attention", "layers"])
def test_ops_touch_only_their_own_memory(isa: str, driver: str) -> None:
    run(build("memory", driver, isa, ops()))


@pytest.mark.parametrize("driver", ["attention", "layers"])
def test_ops_have_no_races(driver: str) -> None:
    """Of the AVX2 kernels: what threads share does not depend on the instruction set."""
    run(build("threads", driver, "avx2", ops()))


def test_pool_has_no_races() -> None:
    run(build("threads", "pool", "avx2", [CPU / "thread_pool.cpp"], kernels="none"))


@pytest.mark.parametrize("kind", list(SANITIZERS))
def test_direct_reads_write_what_was_asked_for_without_races(tmp_path: Path, kind: str) -> None:
    reader = Path("csrc") / "io" / "direct_read.cpp"
    run(build(kind, "direct_read", "avx2", [reader], kernels="none"), tmp_path)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_kernels_share_no_symbols_between_instruction_sets(isa: str) -> None:
    """A weak symbol could be taken from the AVX-512 objects and run where there is only AVX2; a constructor
    would run at import, before the processor is asked."""
    # -O0 inlines nothing that it need not, so every function that could be shared shows.
    flags = [*COMMON, "-fno-exceptions", f"-DSTRATA_ISA={isa}", *(AVX512 if isa == "avx512" else [])]
    setup, folder = Setup.read(), Path("build") / "plain" / isa
    sources = setup.group("kernels_avx2")[0]
    objects = setup.compile_all([(source, flags, folder) for source in sources])
    assert len(objects) == len(sources) > 0
    for source, made in zip(sources, objects, strict=True):
        names = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True).stdout
        for line in names.splitlines():
            kind, name = line[17:18], line[19:]
            assert kind not in "WVuv", f"{source.name}: {name} is shared with other objects"
            assert "_GLOBAL__sub_I" not in name, f"{source.name}: runs code at import"
            assert kind not in "TDR" or f"::{isa}::" in name, f"{source.name}: {name} stands outside of {isa}"


def test_features_are_read_without_avx(tmp_path: Path) -> None:
    """What runs before the processor is known to have AVX2 holds no AVX instruction (they begin with "v")."""
    flags = ["-std=c++17", "-O3", "-march=x86-64", "-MMD"]
    made = Setup.read().compile_all([(CPU / "features.cpp", flags, tmp_path)])[0]
    command = ["objdump", "-d", "--no-show-raw-insn", made]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    operations = [line.split("\t")[1].split()[0] for line in listing if "\t" in line]
    assert "cpuid" in operations
    assert not [name for name in operations if name.startswith("v")]
