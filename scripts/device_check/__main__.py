"""Runs the stages and writes device_check.json and device_check.txt. Exit code 0: every stage was ok."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from pathlib import Path

from device_check.report import report
from device_check.stages import STAGES, Outcome, run_stage
from strata.hardware.gpu_stack import gpu_stack


def main() -> int:
    """One line per stage while it runs."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    stack = gpu_stack()
    outcomes: list[Outcome] = []
    for stage in STAGES:
        if options.only and stage.name not in options.only:
            continue
        outcome = run_stage(stage, options.out, emulated=options.emulated, usable=stack.usable)
        outcomes.append(outcome)
        print(f"{stage.name:<10} {outcome.status:<8} {outcome.seconds:6.1f} s of {stage.limit}", flush=True)
    mode = "emulated device" if options.emulated else "GPU"
    found = {
        "mode": mode,
        "python": platform.python_version(),
        "gpu": stack.to_json(),
        "stages": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    (options.out / "device_check.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    text = report(mode, stack, outcomes)
    (options.out / "device_check.txt").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/device_check.sh", description=__doc__)
    parser.add_argument(
        "--emulated", action="store_true", help="the same stages, small, on the emulated device"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("device_check"), help="folder of results [device_check]"
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", nargs="*", choices=names, help="some of the stages")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
