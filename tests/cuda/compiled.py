"""Kernels compiled by NVRTC for sm_86, cached; tests that need them are skipped without the wheel."""

from __future__ import annotations

from functools import cache

import pytest
from runners import source_of

from strata.backends.cuda.compile_cache import CompileCache
from strata.backends.cuda.nvrtc import Compiled, load_nvrtc
from strata.errors import HardwareError


@cache
def compiled(file: str) -> Compiled:
    try:
        nvrtc = load_nvrtc()
    except HardwareError as error:
        pytest.skip(str(error))
    return CompileCache(nvrtc).compile(source_of(file))


def ptx_of(file: str) -> str:
    return compiled(file).ptx
