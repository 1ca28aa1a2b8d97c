"""The kernels' own tests, from the same files: those marked gpu, or some on the emulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from device_check.stages import stage_main

FILE = "tests/cuda/test_on_device.py"
CHOSEN_ON_A_CARD, CHOSEN_WITHOUT = "test_on_a_gpu", "test_on_the_emulated_device and (add or norm or route)"


def run(emulated: bool) -> dict[str, Any]:
    """Counts, and the names of cases that failed."""
    chosen = CHOSEN_WITHOUT if emulated else CHOSEN_ON_A_CARD
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", FILE, "-q", "-k", chosen, f"--junitxml={report}"]
        code = subprocess.run(command, check=False).returncode
        if not report.is_file():
            return {"problem": f"pytest ended with {code} and wrote no report"}
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case.get("name", "") for case in cases if case.find("failure") is not None]
    failed += [case.get("name", "") for case in cases if case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    result = {"cases": len(cases), "skipped": skipped, "failed": failed, "problem": ""}
    if failed or skipped == len(cases):
        result["problem"] = f"{len(failed)} of {len(cases)} cases failed, {skipped} were skipped"
    return result


if __name__ == "__main__":
    stage_main(run)
