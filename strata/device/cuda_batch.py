"""cuMemcpyBatchAsync through ctypes: many copies, one call. Written, not yet run on hardware.

The driver has it since CUDA 12.8. CUDA 13 took a parameter away (failIdx) under the same name in its headers;
asking cuGetProcAddress for the function as of version 12080 gives the first form from every driver.
Reference: NVIDIA, "CUDA Driver API", memory management; structures as in cuda.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from strata.device.base import Copy
from strata.device.buffers import DeviceError

VERSION = 12080  # CUDA 12.8, as cuda.h writes it
SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
SUCCESS = 0
NO_INDEX = ctypes.c_size_t(-1).value


class _Location(ctypes.Structure):
    """CUmemLocation; zeros: no hint, which is right for what the driver allocated or registered."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy(Protocol):
    """Enqueues copies on a raw stream."""

    def __call__(self, copies: Sequence[Copy], stream: int) -> None:
        """DeviceError when the driver refuses."""
        ...


def find_batch_copy(driver: Any) -> BatchCopy | None:
    """The driver's batched copy; None when the driver (a ctypes library) is older than CUDA 12.8."""
    lookup = getattr(driver, "cuGetProcAddress_v2", None)
    if lookup is None:
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    arguments = (
        b"cuMemcpyBatchAsync",
        ctypes.byref(address),
        VERSION,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if lookup(*arguments) != SUCCESS or status.value != SUCCESS or not address.value:
        return None
    return DriverBatchCopy(_prototype()(address.value))


def load_driver() -> Any:
    """libcuda as a ctypes library; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class DriverBatchCopy:
    """Calls the function with one set of attributes for all copies."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, copies: Sequence[Copy], stream: int) -> None:
        """Enqueue; sources are read in stream order, so pinned memory may still change before the call."""
        count = len(copies)
        attributes = _Attributes(source_order=SOURCE_IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
        failed = ctypes.c_size_t(NO_INDEX)
        status = self._function(
            (ctypes.c_uint64 * count)(*(copy.dst.address for copy in copies)),
            (ctypes.c_uint64 * count)(*(copy.src.address for copy in copies)),
            (ctypes.c_size_t * count)(*(copy.dst.nbytes for copy in copies)),
            count,
            ctypes.byref(attributes),
            (ctypes.c_size_t * 1)(0),
            1,
            ctypes.byref(failed),
            stream,
        )
        if status != SUCCESS:
            at = "" if failed.value == NO_INDEX else f" at copy {failed.value}"
            raise DeviceError(
                f"cuMemcpyBatchAsync of {count} copies failed{at} with CUresult {status}",
                remedy="see CUresult in the CUDA driver API's reference",
            )


def _prototype() -> Any:
    """CUDA 12.8: (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream) -> CUresult."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
