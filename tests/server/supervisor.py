"""What systemd does for a service of Type=notify: a socket to talk to, and a new start after a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60.0  # against hangs


class Supervisor:
    """Runs a command with Restart=on-failure, and hears what it says. messages: (process id, assignment)."""

    def __init__(self, command: list[str], socket_path: Path, watchdog_seconds: float) -> None:
        self._command = command
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(socket_path))
        self._socket.settimeout(0.05)
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "STRATA_API_KEY"},
            "NOTIFY_SOCKET": str(socket_path),
            "WATCHDOG_USEC": str(round(watchdog_seconds * 1e6)),
        }
        self.messages: list[tuple[int, str]] = []
        self.exit_codes: list[int] = []
        self.log = socket_path.with_suffix(".log")
        self._closing = False
        self.process = self._start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join(SECONDS)
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def said(self, assignment: str, process: int | None = None) -> int:
        """How often the process (None: the one that runs) said something that begins so."""
        asked = self.process.pid if process is None else process
        return sum(pid == asked and text.startswith(assignment) for pid, text in list(self.messages))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, (self.messages[-9:], self.exit_codes, self.log.read_text()[-2000:])
            time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """The id of the process that got the signal."""
        process = self.process.pid
        self.process.send_signal(number)
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stderr=log, env=self._environment)

    def _run(self) -> None:
        while not self._closing:
            self._hear()
            code = self.process.poll()
            if code is not None and len(self.exit_codes) < self._starts:
                self.exit_codes.append(code)
                if code != 0:
                    self._starts += 1
                    self.process = self._start()

    _starts = 1

    def _hear(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
        except TimeoutError:
            return
        sender = int.from_bytes(
            ancillary[0][2][:4], "little"
        )  # of struct ucred: who sent it, as systemd asks
        self.messages += [(sender, line) for line in data.decode().split("\n")]
