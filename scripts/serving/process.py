"""`strata serve` as a process of a script's own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from serving.client import Client

ROOT = Path(__file__).resolve().parents[2]
# The engine looks at itself when it has ended: without requests, every page must be free.
_CHECKED = """
import sys
from strata.interfaces.server.worker import EngineThread
serve = EngineThread._serve
def checked(thread, engine):
    serve(thread, engine)
    engine.check_integrity()
    print("integrity checked", file=sys.stderr, flush=True)
EngineThread._serve = checked
from strata.interfaces.cli import main
main(sys.argv[1:])
"""


class StrataServer:
    """Runs until `stop`. arguments: of `strata serve`. log: where stderr goes."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        command = [sys.executable, "-c", _CHECKED, "serve", *arguments, "--port", "0"]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream, env=dict(environment), cwd=ROOT)
        self._usage = psutil.Process(self.process.pid)
        self.samples: list[tuple[float, int]] = []
        self._watching = threading.Event()

    def ready(self, seconds: float = 600.0) -> Client:
        """Wait until it answers. Raises RuntimeError with its log when it ends instead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            text = self.log.read_text(errors="replace")
            found = re.search(r"url=http://([\d.]+):(\d+)", text)
            if found and re.search(r"^\S* *ready ", text, re.MULTILINE):
                return Client(found[1], int(found[2]))
            time.sleep(0.1)
        raise RuntimeError(f"the server did not get ready:\n{self.log.read_text(errors='replace')}")

    @property
    def resident(self) -> int:
        """Bytes of memory that it has."""
        return int(self._usage.memory_info().rss)

    @property
    def files(self) -> int:
        """Open files and sockets."""
        return int(self._usage.num_fds())

    @property
    def threads(self) -> int:
        """Threads that run."""
        return int(self._usage.num_threads())

    def watch(self, every: float) -> None:
        """Take `samples` of (seconds, resident bytes) in the background until `stop`."""

        def sample() -> None:
            while not self._watching.wait(every) and self.process.poll() is None:
                self.samples.append((time.monotonic(), self.resident))

        threading.Thread(target=sample, daemon=True).start()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._watching.set()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
