"""What `strata doctor --measure` says, the card's part."""

from __future__ import annotations

from typing import Any

from device_check.stages import stage_main
from strata.interfaces.gpu_report import describe_gpu, examine_gpu


def run(emulated: bool) -> dict[str, Any]:
    """Facts, and the same for people."""
    facts = examine_gpu(measure=not emulated)
    return {**facts, "lines": list(describe_gpu(facts)), "problem": facts["link_problem"]}


if __name__ == "__main__":
    stage_main(run)
