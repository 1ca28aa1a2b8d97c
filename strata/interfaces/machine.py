"""The machine as a plain dict, for `strata doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from strata.backends import isa
from strata.backends.cpu import CpuBackend
from strata.errors import CapacityError, StrataError
from strata.hardware.bandwidth import read_bandwidth
from strata.hardware.cpu import choose_cpus, format_cpu_list, topology
from strata.hardware.host_memory import available_bytes

_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine() -> dict[str, Any]:
    """Sizes in bytes, bandwidth in bytes/s (0: unknown); `problem`: what keeps Strata from running, or ""."""
    machine = topology()
    return {
        **_processor(),
        "threads": choose_cpus(machine=machine).describe(),
        "allowed_cpus": format_cpu_list(machine.allowed),
        "cpu_quota": machine.quota,
        "numa_nodes": [{"index": n.index, "cpus": format_cpu_list(n.cpus)} for n in machine.nodes],
        "memory": psutil.virtual_memory().total,
        "available": available_bytes(),
        "huge_pages": _huge_pages(),
        "transparent_huge_pages": _chosen(_read(_TRANSPARENT)),
    }


def _processor() -> dict[str, Any]:
    """Name, instruction set and bandwidth, or the problem with them."""
    found: dict[str, Any] = {"processor": "unknown", "isa": "", "bandwidth": 0.0, "problem": ""}
    found["warnings"] = list(choose_cpus().warnings)
    try:
        features = isa.extension().features()
        found["processor"] = features["brand"]
        found["isa"] = isa.choose_isa(features)
        found["bandwidth"] = read_bandwidth(CpuBackend().cpu).best
    except CapacityError as error:
        found["warnings"].append(str(error))
    except StrataError as error:
        found["problem"] = str(error)
    return found


def _huge_pages(root: Path = _HUGE_PAGES) -> list[dict[str, int]]:
    """Reserved huge pages by size."""
    pages = []
    for folder in sorted(root.glob("hugepages-*kB")):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = (int(_read(folder / name) or 0) for name in ("nr_hugepages", "free_hugepages"))
        if total:
            pages.append({"bytes": size, "total": total, "free": free})
    return pages


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never" -> "madvise"."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
