"""Everything that computing on a graphics card needs, from the card to the compiler: what is there, what is
missing, and the command that brings it.

Nothing is imported and no context is made: cupy takes a second to import, and a look must cost nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import HardwareError
from strata.hardware.files import ROOT, read_text
from strata.hardware.nvml import Card, DriverFacts, driver_facts, load_nvml
from strata.hardware.pci import graphics_cards

OLDEST_DRIVER = 525
"""Machine code of NVRTC 12.x runs with it and newer (NVIDIA, "CUDA Compatibility")."""
OLDEST_COMPUTE, NEWEST_COMPUTE = (8, 0), (9, 0)
"""Compute capabilities that csrc/cuda is written for: bf16 tensor cores and cp.async begin with 8.0."""
INSTALL = "pip install 'strata-moe[gpu]'"
CUPY, NVRTC = "cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"
_MODULE = "sys/module/nvidia/version"
_VERSION = re.compile(r"\d{3,4}(?:\.\d+)*")


@dataclass(frozen=True)
class Missing:
    """what: one phrase; remedy: a command, or what to do."""

    what: str
    remedy: str


@dataclass(frozen=True)
class GpuStack:
    """pci: addresses of NVIDIA cards on the bus, with or without a driver. driver: its version, "" = none.

    cupy, nvrtc: versions of the installed packages, "" = none. missing: in the order in which to mend it.
    """

    pci: tuple[str, ...]
    driver: str
    cards: tuple[Card, ...]
    cupy: str
    nvrtc: str
    missing: tuple[Missing, ...]

    @property
    def usable(self) -> bool:
        """Whether `device.use: cuda` can start."""
        return not self.missing

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def require(self) -> None:
        """HardwareError that names what is missing, all of it, and the first thing to do about it."""
        if self.missing:
            causes = "; ".join(one.what for one in self.missing)
            raise HardwareError(f"device.use is cuda, and {causes}", remedy=self.missing[0].remedy)


def gpu_stack(
    root: Path = ROOT,
    library: Any = None,
    version_of: Callable[[str], str] | None = None,
) -> GpuStack:
    """This machine's. root, library (NVML), version_of (a package, "" = absent): for tests."""
    pci = tuple(card.address for card in graphics_cards(root))
    facts = driver_facts(load_nvml() if library is None and root == ROOT else library)
    driver = (facts.version if facts else "") or _module_version(root)
    installed = version_of or _installed
    cupy, nvrtc = installed(CUPY), installed(NVRTC)
    cards = facts.cards if facts else ()
    missing = [*_card_problems(pci, driver, facts), *_package_problems(cupy, nvrtc)]
    return GpuStack(pci, driver, cards, cupy, nvrtc, tuple(missing))


def _module_version(root: Path) -> str:
    """Of the loaded kernel module."""
    found = _VERSION.match(read_text(root / _MODULE) or "")
    return found[0] if found else ""


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _card_problems(pci: tuple[str, ...], driver: str, facts: DriverFacts | None) -> Iterator[Missing]:
    newer = f"install NVIDIA's driver, {OLDEST_DRIVER} or newer: sudo apt install nvidia-driver-550"
    if not pci and not driver:
        yield Missing(
            "there is no NVIDIA card on the PCI bus",
            "use a machine with a card of compute capability 8.0 or more (RTX 30 series, A100 and newer)",
        )
        return
    if not driver:
        yield Missing(f"the card {pci[0]} has no driver", newer)
        return
    if int(driver.partition(".")[0]) < OLDEST_DRIVER:
        yield Missing(f"the driver is {driver}, {OLDEST_DRIVER} is the oldest that works", newer)
    if facts is None:
        yield Missing("the driver's libraries are not visible here", "in a container: run it with --gpus all")
    elif facts.problem or not facts.cards:
        yield Missing(
            facts.problem or "the driver shows no card",
            "nvidia-smi should list the card; after a driver's update: reboot",
        )
    elif not OLDEST_COMPUTE <= facts.cards[0].compute <= NEWEST_COMPUTE:
        versions = facts.cards[0].compute, OLDEST_COMPUTE, NEWEST_COMPUTE
        found, oldest, newest = (".".join(map(str, version)) for version in versions)
        yield Missing(
            f"{facts.cards[0].name} has compute capability {found}, the kernels are for {oldest} to {newest}",
            "set device.use to none",
        )


def _package_problems(cupy: str, nvrtc: str) -> Iterator[Missing]:
    if not cupy:
        yield Missing(f"{CUPY} is not installed", INSTALL)
    if not nvrtc:
        yield Missing(f"{NVRTC} is not installed", INSTALL)
    elif not nvrtc.startswith("12."):
        yield Missing(f"{NVRTC} is {nvrtc}, which is not 12.x", INSTALL)
