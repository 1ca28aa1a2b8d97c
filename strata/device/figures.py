"""What virtual time is computed from: the speeds of one device and its links, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from strata.errors import HardwareError


@dataclass(frozen=True)
class LinkFigures:
    """One direction between host and device.

    bytes_per_s: pinned memory, large copies. latency_s: per copy. handshake_s: per call, so once for a batch.
    """

    bytes_per_s: float
    latency_s: float
    handshake_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0 or self.handshake_s < 0:
            raise HardwareError(
                f"{self} is no link", remedy="give a speed above 0 and delays of 0 or more seconds"
            )

    def seconds(self, nbytes: int, copies: int = 1) -> float:
        """Time that one call with `copies` copies of `nbytes` in all keeps the copy engine busy."""
        return self.handshake_s + copies * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class DeviceFigures:
    """Speeds and sizes of one device. Where they come from (measured, datasheet) is the caller's to say.

    pageable_bytes_per_s: copies from or to memory that is not page-locked, either direction.
    memory_bytes_per_s: the device's own memory. macs_per_s: multiply-accumulates of the kernels' dtype.
    kernel_latency_s: shortest time of a kernel on the device. call_s: host time of one call.
    host_copy_bytes_per_s: one host thread copying between host buffers.
    """

    memory_bytes: int
    h2d: LinkFigures
    d2h: LinkFigures
    pageable_bytes_per_s: float
    memory_bytes_per_s: float
    macs_per_s: float
    kernel_latency_s: float
    call_s: float
    host_copy_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name in ("kernel_latency_s", "call_s") else 1.0
            if not isinstance(value, LinkFigures) and value < least:
                raise HardwareError(f"{field.name} is {value}", remedy=f"give at least {least:g}")

    def kernel_seconds(self, nbytes: int, macs: int) -> float:
        """The roofline: whichever takes longer, moving the bytes or making the products."""
        return self.kernel_latency_s + max(nbytes / self.memory_bytes_per_s, macs / self.macs_per_s)
