"""Interleaved memory through py-libnuma, in processes of their own: the policy stays with the thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

from strata.hardware import placement


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_the_kernel_interleaves_over_the_nodes_given() -> None:
    if run("from strata.hardware.placement import interleave; print(interleave([0]))"):
        pytest.skip("libnuma cannot interleave here")
    code = (
        "from strata.hardware.placement import interleave; interleave([0]); "
        "print([line.split()[1] for line in open('/proc/self/numa_maps')][-1])"
    )
    assert run(code) == "interleave:0"


def test_a_machine_without_libnuma_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numa", None)
    assert placement.interleave([0, 1]) == "libnuma is not installed"


def test_what_libnuma_did_not_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    numa = pytest.importorskip("numa.memory")
    monkeypatch.setattr(numa, "set_interleave_nodes", lambda *nodes: None)
    monkeypatch.setattr(numa, "get_interleave_nodes", lambda: [0])
    assert placement.interleave([0, 1]) == "nodes [0, 1] were asked for, libnuma took [0]"

    def refuse(*nodes: int) -> None:
        raise Exception("set interleave_nodes failed")

    monkeypatch.setattr(numa, "set_interleave_nodes", refuse)
    assert "set interleave_nodes failed" in placement.interleave([0, 1])
