"""Which instruction set is used, and that a processor without AVX2 gets a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strata.backends.cpu import CpuBackend
from strata.backends.isa import ENV, choose_isa, extension
from strata.errors import ConfigError, HardwareError

OLD = {"avx2": False, "avx512": False, "brand": "Old Processor"}
HASWELL = {"avx2": True, "avx512": False, "brand": "E5 v4"}
NEW = {"avx2": True, "avx512": True, "brand": "Xeon"}


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)


def test_best_of_the_processor() -> None:
    assert choose_isa(HASWELL) == "avx2"
    assert choose_isa(NEW) == "avx512"


def test_the_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "avx2")
    assert choose_isa(NEW) == "avx2"
    assert CpuBackend(threads=1).cpu.isa == "avx2"
    monkeypatch.setenv(ENV, "avx512")
    with pytest.raises(HardwareError, match=r"asks for avx512.*E5 v4"):
        choose_isa(HASWELL)
    monkeypatch.setenv(ENV, "sse9")
    with pytest.raises(ConfigError, match="sse9") as caught:
        choose_isa(NEW)
    assert "avx2, avx512" in caught.value.remedy


def test_no_avx2_is_a_sentence() -> None:
    with pytest.raises(HardwareError, match=r"Old Processor.*no AVX2"):
        choose_isa(OLD)


def test_the_extension_refuses_what_the_processor_lacks() -> None:
    with pytest.raises(ValueError, match="'mmx'"):
        extension().Cpu([0], "mmx")


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.parametrize(("processor", "answer"), [("Nehalem", "no AVX2"), ("Haswell", "isa avx2")])
def test_emulated_processors(processor: str, answer: str) -> None:
    code = "from strata.backends.cpu import CpuBackend; print('isa', CpuBackend(threads=1).cpu.isa)"
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", processor, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=120,
    )
    assert answer in done.stdout + done.stderr
    assert done.returncode >= 0, "killed by a signal"


def test_the_calling_thread_gets_its_cpus_back() -> None:
    """It stands on worker 0's CPU while an op runs, and nothing that it starts later inherits that."""
    before = os.sched_getaffinity(0)
    cpu = extension().Cpu([min(before)], "avx2", True)
    seen: list[set[int]] = []
    stop = threading.Event()

    def watch(thread: int) -> None:
        while not stop.is_set():
            seen.append(os.sched_getaffinity(thread))

    watcher = threading.Thread(target=watch, args=(threading.get_native_id(),))
    watcher.start()
    cpu.read_bandwidth(1 << 24, 0.2)
    stop.set()
    watcher.join()
    assert os.sched_getaffinity(0) == before
    assert {min(before)} in seen
