"""The compiled extension and the instruction set its kernels use, chosen once per backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from strata.errors import ConfigError, HardwareError

ENV = "STRATA_ISA"
NAMES = ("avx2", "avx512")


def extension() -> ModuleType:
    """`strata._C`; HardwareError when it was not built."""
    try:
        return importlib.import_module("strata._C")
    except ImportError as error:
        raise HardwareError(
            f"the compiled part of Strata cannot be loaded: {error}",
            remedy="build it: pip install . (needs g++), or python setup.py build_ext --inplace; "
            "after pip install ., a source folder that is the current one hides it from python -m strata",
        ) from error


def choose_isa(features: Mapping[str, object], forced: str | None = None) -> str:
    """The best instruction set of the processor, or the one that `forced` or STRATA_ISA names.

    features: as `_C.features()` gives them. HardwareError: the processor lacks it; ConfigError: no such name.
    """
    brand = features["brand"]
    if not features["avx2"]:
        raise HardwareError(
            f"this processor ({brand}) has no AVX2, which the CPU kernels need",
            remedy="use a processor from 2013 (Intel Haswell) or 2015 (AMD Excavator) on; in a virtual "
            "machine, pass the host's CPU features through",
        )
    asked = forced or os.environ.get(ENV, "")
    if not asked:
        return "avx512" if features["avx512"] else "avx2"
    if asked not in NAMES:
        raise ConfigError(f"{ENV} is {asked!r}", remedy=f"one of {', '.join(NAMES)}, or unset it")
    if not features[asked]:
        raise HardwareError(
            f"{ENV} asks for {asked}, but this processor ({brand}) has only AVX2", remedy=f"unset {ENV}"
        )
    return asked
