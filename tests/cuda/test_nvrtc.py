"""The compiler module and its cache, without a GPU or a driver."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
from runners import source_of

from strata.backends.cuda import nvrtc as nvrtc_module
from strata.backends.cuda.compile_cache import CompileCache
from strata.backends.cuda.nvrtc import Compiled, KernelCompileError, Nvrtc, load_nvrtc
from strata.backends.cuda.sources import KernelSource, kernel_names, kernel_source
from strata.errors import HardwareError

SOURCE = KernelSource(
    "twice.cu",
    '#include "a.cuh"\nextern "C" __global__ void twice(int* x) { *x *= TWO; }',
    {"a.cuh": "#define TWO 2"},
)


MANY_ENTRIES = tuple(
    f"{name}{suffix}" for name in ("linear", "expert_gate_up", "expert_down") for suffix in ("", "_prefill")
)


class CountingCompiler:
    """Stands for Nvrtc: counts and remembers options."""

    def __init__(self, version: tuple[int, int] = (12, 6)) -> None:
        self.version = version
        self.options: list[Sequence[str]] = []

    def compile(self, source: KernelSource, options: Sequence[str]) -> Compiled:
        self.options.append(options)
        return Compiled(f"ptx of {source.name}", b"\x7fELF\0code", "log")


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("the wheel nvidia-cuda-nvrtc-cu12 is not installed")
    return load_nvrtc()


# linear and the experts have many entries and no PTX of their own: attention and wrappers stand for them.
@pytest.mark.parametrize("name", [name for name in kernel_names() if name not in MANY_ENTRIES])
def test_kernels_use_only_what_the_oldest_architecture_has(nvrtc: Nvrtc, name: str) -> None:
    """A virtual architecture gives PTX only: the frontend's work, not ptxas'."""
    compiled = CompileCache(nvrtc, "compute_80").compile(kernel_source(name))
    assert ".target sm_80" in compiled.ptx and ".entry" in compiled.ptx


def test_every_wrapper_exists_on_the_oldest_architecture(nvrtc: Nvrtc) -> None:
    assert ".entry" in CompileCache(nvrtc, "compute_80").compile(source_of("wrappers")).ptx


def test_machine_code_is_made_for_other_architectures(nvrtc: Nvrtc) -> None:
    for arch in ("sm_80", "sm_89", "sm_90"):
        compiled = CompileCache(nvrtc, arch).compile(kernel_source("norm"))
        assert compiled.cubin.startswith(b"\x7fELF") and f".target {arch}" in compiled.ptx


def test_errors_name_kernel_line_and_log(nvrtc: Nvrtc) -> None:
    wrong = KernelSource("wrong.cu", "\n\n__global__ void f() { flaot x = 1; }\n", {})
    with pytest.raises(
        KernelCompileError, match=r"wrong\.cu, line 3: `__global__ void f\(\) \{ flaot"
    ) as error:
        nvrtc.compile(wrong, ["-arch=sm_86"])
    assert (error.value.kernel, error.value.line) == ("wrong.cu", 3)
    assert 'identifier "flaot" is undefined' in error.value.log


def test_errors_in_headers_name_the_header(nvrtc: Nvrtc) -> None:
    wrong = KernelSource("user.cu", '#include "part.cuh"\n', {"part.cuh": "typedef int a;\nnonsense;\n"})
    with pytest.raises(KernelCompileError, match=r"part\.cuh, line 2: `nonsense;`"):
        nvrtc.compile(wrong, ["-arch=sm_86"])


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc_module, "_wheel_folders", lambda: [tmp_path])
    with pytest.raises(HardwareError, match=r"NVRTC 12\.x .*\n.*pip install 'strata-moe\[gpu\]'"):
        nvrtc_module._library_path()


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    first = CompileCache(compiler, folder=tmp_path).compile(SOURCE)  # type: ignore[arg-type]
    again = CompileCache(compiler, folder=tmp_path).compile(SOURCE)  # type: ignore[arg-type]
    assert first == again and len(compiler.options) == 1
    assert len(list(tmp_path.iterdir())) == 1, "a temporary file was left"


@pytest.mark.parametrize("change", ["source", "header", "name", "options", "version", "arch"])
def test_whatever_the_result_depends_on_is_in_the_key(tmp_path: Path, change: str) -> None:
    compiler = CountingCompiler((12, 5) if change == "version" else (12, 6))
    CompileCache(CountingCompiler(), folder=tmp_path).compile(SOURCE)  # type: ignore[arg-type]
    source = {
        "source": KernelSource(SOURCE.name, SOURCE.text + "\n", SOURCE.headers),
        "header": KernelSource(SOURCE.name, SOURCE.text, {"a.cuh": "#define TWO 3"}),
        "name": KernelSource("other.cu", SOURCE.text, SOURCE.headers),
    }.get(change, SOURCE)
    cache = CompileCache(compiler, "sm_80" if change == "arch" else "sm_86", tmp_path)  # type: ignore[arg-type]
    cache.compile(source, ["-DX"] if change == "options" else [])
    assert len(compiler.options) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "not json"])
def test_damaged_entries_are_made_again(tmp_path: Path, damage: str) -> None:
    compiler = CountingCompiler()
    cache = CompileCache(compiler, folder=tmp_path)  # type: ignore[arg-type]
    good = cache.compile(SOURCE)
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()
    flipped = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
    entry.write_bytes(
        {"cut": content[:-3], "flipped": flipped, "emptied": b"", "not json": b"{" + content}[damage]
    )
    assert cache.compile(SOURCE) == good and len(compiler.options) == 2
    assert entry.read_bytes() == content


def test_the_machine_code_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    cache = CompileCache(CountingCompiler(), folder=tmp_path)  # type: ignore[arg-type]
    path = cache.cubin_file(SOURCE)
    assert path.read_bytes() == b"\x7fELF\0code"
    path.write_bytes(b"damaged")
    assert cache.cubin_file(SOURCE).read_bytes() == b"\x7fELF\0code"


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert CompileCache(CountingCompiler(), folder=blocked / "sub").compile(SOURCE).log == "log"  # type: ignore[arg-type]
