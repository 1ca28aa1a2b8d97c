"""Every kernel file through NVRTC, for the card's architecture (for an RTX 3090's where there is none)."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from device_check.stages import stage_main
from strata.backends import isa
from strata.backends.cuda.compile_cache import DEFAULT_ARCH, CompileCache
from strata.backends.cuda.nvrtc import load_nvrtc
from strata.backends.cuda.sources import kernel_names, kernel_source
from strata.errors import StrataError
from strata.hardware.gpu_stack import gpu_stack

QUICK = 2
"""Files that a dry run compiles: the others are compiled by tests of their own."""


def run(emulated: bool) -> dict[str, Any]:
    """Seconds of each file, or its error; the extension is built already, or this would not start."""
    cards = gpu_stack().cards
    arch = "sm_{}{}".format(*cards[0].compute) if cards else DEFAULT_ARCH
    names = kernel_names()[:QUICK] if emulated else kernel_names()
    result: dict[str, Any] = {"arch": arch, "isa": isa.choose_isa(isa.extension().features()), "problem": ""}
    try:
        nvrtc = load_nvrtc()
    except StrataError as error:
        return {**result, "problem": str(error)}
    with TemporaryDirectory() as folder:
        cache = CompileCache(nvrtc, arch, Path(folder))
        seconds, problems = {}, []
        for name in names:
            begin = time.monotonic()
            try:
                cache.compile(kernel_source(name))
            except StrataError as error:
                problems.append(str(error))
            seconds[name] = round(time.monotonic() - begin, 2)
    return {**result, "nvrtc": list(nvrtc.version), "seconds": seconds, "problem": "\n".join(problems)}


if __name__ == "__main__":
    stage_main(run)
