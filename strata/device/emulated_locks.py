"""What an emulated driver page-locks: how much, how fast, and whether read-only mappings too."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.device.buffers import Bytes, PageLockError


@dataclass
class PageLocks:
    """most: bytes that may be registered at once, None: any. read_only: whether mapped files may be.

    bytes_per_s: of locking, None: it takes no time. Real drivers lock about 2.5 GB/s of pages of 4 KiB.
    """

    most: int | None = None
    read_only: bool = True
    bytes_per_s: float | None = None
    held: dict[int, int] = field(default_factory=dict)

    def lock(self, flat: Bytes, name: str) -> float:
        """The seconds that it takes. PageLockError: refused."""
        if not self.read_only and not flat.flags.writeable:
            raise PageLockError(
                f"'{name}' is mapped read-only, and this driver locks writable memory alone",
                remedy="copy it into page-locked memory",
            )
        locked = sum(self.held.values())
        if self.most is not None and locked + flat.nbytes > self.most:
            raise PageLockError(
                f"'{name}' has {flat.nbytes} bytes, {locked} of {self.most} are page-locked",
                remedy="raise the limit, or lock less",
            )
        self.held[flat.ctypes.data] = flat.nbytes
        return flat.nbytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def unlock(self, address: int) -> None:
        """Harmless for memory that was never registered."""
        self.held.pop(address, None)
