"""The stages, each a process with a time limit of its own, so that one that fails or hangs loses no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "timeout", "no GPU"]
TAIL = 4000


@dataclass(frozen=True)
class Stage:
    """limit: seconds, all of them together below ten minutes. module: of this package. needs_gpu: or the
    emulated device."""

    name: str
    module: str
    limit: int
    needs_gpu: bool
    what: str


STAGES = (
    Stage("build", "build", 110, False, "kernels compiled for the card by NVRTC"),
    Stage("doctor", "doctor", 30, False, "driver, card, memory, link under load, libraries"),
    Stage("kernels", "kernels", 120, True, "every kernel's cases against the reference"),
    Stage("parity", "parity", 60, True, "greedy text of the demo model against the CPU backend's"),
    Stage("bandwidth", "bandwidth", 80, True, "bytes per second of each kernel beside the card's own"),
    Stage("overlap", "overlap", 30, True, "copies hidden under kernels, by event times"),
    Stage("locking", "locking", 18, True, "which host memory the driver page-locks, and what that is worth"),
    Stage("decode", "decode", 150, True, "tokens per second in the shape of Qwen3-30B-A3B, experts cached"),
)


@dataclass
class Outcome:
    """result: what the stage found, {} unless ok. log: the end of what it printed."""

    name: str
    what: str
    status: Status
    seconds: float = 0.0
    limit: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def run_stage(stage: Stage, out: Path, *, emulated: bool, usable: bool) -> Outcome:
    """One stage to its end, its limit, or not at all where it needs a card and there is none."""
    outcome = Outcome(stage.name, stage.what, "no GPU", limit=stage.limit)
    if stage.needs_gpu and not (emulated or usable):
        return outcome
    file = out / f"{stage.name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"device_check.{stage.module}", "--json", str(file)]
    command += ["--emulated"] if emulated else []
    begin = time.monotonic()
    outcome.status, outcome.log = _run(command, out / f"{stage.name}.log", stage.limit)
    outcome.seconds = time.monotonic() - begin
    if outcome.status == "ok":
        outcome.result = json.loads(file.read_text(encoding="utf-8"))
        outcome.status = "failed" if outcome.result.get("problem") else "ok"
    return outcome


def _run(command: Sequence[str], log: Path, limit: int) -> tuple[Status, str]:
    """The process and all that it started end with it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    return ("timeout" if code is None else "ok" if code == 0 else "failed"), tail


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stage_main(run: Callable[[bool], dict[str, Any]]) -> None:
    """What each stage's module does: run(emulated) makes the result, which goes into the file of --json."""
    emulated, place = "--emulated" in sys.argv, sys.argv.index("--json") + 1
    result = run(emulated)
    Path(sys.argv[place]).write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result, indent=2))
