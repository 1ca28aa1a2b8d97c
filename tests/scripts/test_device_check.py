"""scripts/device_check.sh: its stages on the emulated device, and what it says where there is no card."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
from device_check import bandwidth, decode, locking, overlap  # noqa: E402
from device_check.stages import STAGES, Stage, run_stage  # noqa: E402


def check(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "scripts/device_check.sh"), "--out", str(out), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (out / "device_check.json").is_file(), ended.stderr
    found = json.loads((out / "device_check.json").read_text())
    return ended.returncode, found, (out / "device_check.txt").read_text()


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++, which is not installed")
def test_measurements_on_the_emulated_device() -> None:
    found = bandwidth.run(True)
    assert not found["problem"] and len(found["ops"]) == 5
    assert all(0 < op["share"] < 1 for op in found["ops"].values())
    assert 0.5 < overlap.run(True)["hidden"] <= 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++, which is not installed")
def test_decoding_on_the_emulated_device() -> None:
    found = decode.run(True)
    assert not found["problem"]
    every, few = found["every expert"]["experts"], found["fetched"]["experts"]
    assert every["hits"] >= 8 and every["fetched"] == every["streamed"] == every["computed"] == 0
    assert few["fetched"] + few["streamed"] + few["late"] > 0


def test_page_locking_on_the_emulated_device() -> None:
    """Which locks everything; staged bytes cross after a copy by the host."""
    found = locking.run(True)
    assert not found["problem"] and not found["mapped"]["refused"]
    copied = [found[name]["copy_seconds"] for name in ("mapped", "arena")]
    assert copied[0] == pytest.approx(copied[1]) and found["staged"] > 1.5 * copied[0]


def test_a_stage_from_the_command_line(tmp_path: Path) -> None:
    code, found, text = check(tmp_path, "--emulated", "--only", "doctor")
    (stage,) = found["stages"]
    assert code == 0 and found["mode"] == "emulated device" and stage["status"] == "ok"
    assert stage["result"]["lines"][0] in text and (tmp_path / "doctor.log").is_file()


def test_without_a_card_every_stage_that_needs_one_says_so(tmp_path: Path) -> None:
    if _has_card():
        pytest.skip("this machine has a card")
    names = [stage.name for stage in STAGES if stage.needs_gpu]
    code, found, text = check(tmp_path, "--only", *names)
    assert code == 1 and {stage["status"] for stage in found["stages"]} == {"no GPU"}
    assert len(names) == 6 and text.count("no GPU") == 6 and "missing: " in text


def test_a_stage_that_hangs_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "device_check"
    folder.mkdir()
    (folder / "hangs.py").write_text("import time\nprint('on it', flush=True)\ntime.sleep(600)")
    (folder / "fails.py").write_text("raise SystemExit('a reason')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hangs = run_stage(Stage("hangs", "hangs", 3, False, "never ends"), tmp_path, emulated=False, usable=False)
    assert hangs.status == "timeout" and "on it" in hangs.log
    fails = run_stage(Stage("fails", "fails", 60, True, "breaks"), tmp_path, emulated=True, usable=False)
    assert fails.status == "failed" and "a reason" in fails.log and not fails.result


def test_the_limits_sum_up_to_less_than_ten_minutes() -> None:
    assert sum(stage.limit for stage in STAGES) < 600


def test_what_is_packed_is_what_the_package_needs() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "scripts/device_check/requirements.txt").read_text().splitlines()
    packed = {line for line in lines if line and not line.startswith("#")}
    serving = {"fastapi>=0.115", "uvicorn>=0.30", "prometheus-client>=0.20"}
    needed = {one for one in project["dependencies"] if not one.startswith("torch")} - serving
    assert needed <= packed and set(project["optional-dependencies"]["gpu"]) <= packed


def test_what_the_stages_import_is_packed() -> None:
    """tests/conftest.py is read before the kernels' cases."""
    here = [ROOT / "tests/conftest.py", *(ROOT / "tests/cuda").glob("*.py"), ROOT / "tests/tiny_model.py"]
    files = [*here, *(ROOT / "scripts/device_check").glob("*.py")]
    own = {file.stem for folder in ("tests", "tests/cuda") for file in (ROOT / folder).glob("*.py")}
    own |= {"strata", "device_check", "ptxsim"}
    imported = {name for file in files for name in _imports(file)} - own - set(sys.stdlib_module_names)
    lines = (ROOT / "scripts/device_check/requirements.txt").read_text().splitlines()
    packed = {re.split(r"[<>=]", line)[0] for line in lines if line and not line.startswith("#")}
    assert imported <= packed | {"torch"}  # which is there, or packed "with-torch"


def _imports(file: Path) -> set[str]:
    """The first words of what a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


def _has_card() -> bool:
    from strata.hardware.gpu_stack import gpu_stack

    return gpu_stack().usable
