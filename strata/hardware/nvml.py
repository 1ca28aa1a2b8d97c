"""Graphics cards as NVIDIA's driver describes them, through its management library (NVML) and ctypes.

The library comes with the driver; asking it makes no context on the card and takes none of its memory.
Tested against a stand-in, never against the library itself. Reference: NVIDIA, "NVML API Reference".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEXT = 96
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
MHZ = 1e6


@dataclass(frozen=True)
class Card:
    """One card. compute: (major, minor). memory, free: bytes. Links: generation and width, 0 = not told;
    "now" moves with the load. bus_bits, memory_hz, cores, core_hz: 0 = not told; the clocks are the highest.
    """

    name: str
    pci: str
    compute: tuple[int, int]
    memory: int
    free: int
    generation: int
    width: int
    now_generation: int
    now_width: int
    bus_bits: int = 0
    memory_hz: float = 0.0
    cores: int = 0
    core_hz: float = 0.0


@dataclass(frozen=True)
class DriverFacts:
    """version: of the driver, such as "550.54.14". problem: why cards cannot be asked, or ""."""

    version: str
    cards: tuple[Card, ...]
    problem: str = ""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t, version 3."""

    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("name", ctypes.c_char * 32),
    )


def load_nvml() -> Any:
    """The library as ctypes has it; None without a driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def driver_facts(library: Any) -> DriverFacts | None:
    """What the driver says; None without its library."""
    if library is None:
        return None
    with _opened(library) as problem:
        if problem:
            return DriverFacts("", (), problem)
        version = _text(library.nvmlSystemGetDriverVersion)
        return DriverFacts(version, tuple(_card(library, i) for i in range(_count(library))))


def link_generation(library: Any, index: int = 0) -> int:
    """The generation that a card's link has at this moment; 0: not told."""
    with _opened(library) as problem:
        if problem or index >= _count(library):
            return 0
        return _number(library.nvmlDeviceGetCurrPcieLinkGeneration, _handle(library, index))


@contextmanager
def _opened(library: Any) -> Iterator[str]:
    """The library, initialized; yields why not, or ""."""
    status = int(library.nvmlInit_v2())
    if status != _SUCCESS:
        yield f"the driver does not answer (NVML error {status})"
        return
    try:
        yield ""
    finally:
        library.nvmlShutdown()


def _count(library: Any) -> int:
    count = ctypes.c_uint()
    return count.value if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS else 0


def _handle(library: Any, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def _card(library: Any, index: int) -> Card:
    handle = _handle(library, index)
    memory, pci, major, minor = _Memory(), _Pci(), ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Card(
        name=_text(library.nvmlDeviceGetName, handle),
        pci=pci.name.decode(errors="replace").lower(),
        compute=(major.value, minor.value),
        memory=memory.total,
        free=memory.free,
        generation=_number(library.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        width=_number(library.nvmlDeviceGetMaxPcieLinkWidth, handle),
        now_generation=_number(library.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        now_width=_number(library.nvmlDeviceGetCurrPcieLinkWidth, handle),
        bus_bits=_number(library.nvmlDeviceGetMemoryBusWidth, handle),
        memory_hz=MHZ * _number(library.nvmlDeviceGetMaxClockInfo, handle, ctypes.c_uint(_CLOCK_MEMORY)),
        cores=_number(library.nvmlDeviceGetNumGpuCores, handle),
        core_hz=MHZ * _number(library.nvmlDeviceGetMaxClockInfo, handle, ctypes.c_uint(_CLOCK_SM)),
    )


def _text(function: Callable[..., int], *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    status = function(*arguments, buffer, ctypes.c_uint(_TEXT))
    return buffer.value.decode(errors="replace") if status == _SUCCESS else ""


def _number(function: Callable[..., int], *arguments: Any) -> int:
    """What a card does not tell is 0."""
    value = ctypes.c_uint()
    status = function(*arguments, ctypes.byref(value))
    return value.value if status == _SUCCESS else 0
