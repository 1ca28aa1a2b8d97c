"""sd_notify: what a service tells its manager, one datagram a message (man sd_notify)."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

_MICRO = 1_000_000
_DIGITS = 20
"""Of a 64-bit number, which is what systemd writes."""


@dataclass(frozen=True)
class Notifier:
    """address: the manager's socket, "" without one: then nothing is sent.

    watchdog_seconds: the manager ends the process when it has heard no WATCHDOG=1 for so long; None: it
    does not watch.
    """

    address: str = ""
    watchdog_seconds: float | None = None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """What the manager asks of this process; taken out of the environment, so that no child speaks."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", str(os.getpid()))
        sound = microseconds.isascii() and microseconds.isdecimal() and len(microseconds) <= _DIGITS
        ours = watched == str(os.getpid()) and sound
        seconds = int(microseconds) / _MICRO if ours else 0.0
        return cls(address, seconds or None)

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return bool(self.address)

    def send(self, *assignments: str) -> bool:
        """Send e.g. "READY=1"; whether it was delivered. A manager that is gone is no reason to stop."""
        if not self.address:
            return False
        # "@": a name in the abstract namespace, which begins with a NUL byte
        target = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode("utf-8", "replace"), target)
        except OSError:
            return False
        return True

    def extend_start(self, seconds: float) -> bool:
        """Ask for so many more seconds until READY=1."""
        return self.send(f"EXTEND_TIMEOUT_USEC={round(seconds * _MICRO)}")
