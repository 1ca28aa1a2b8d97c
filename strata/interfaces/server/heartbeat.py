"""What the server tells systemd while it runs: that it loads, that it is ready, and that tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from strata.interfaces.server.worker import EngineThread, State
from strata.interfaces.systemd.notify import Notifier
from strata.interfaces.systemd.unit import START_SECONDS

_FEEDS = 4  # WATCHDOG=1 so often within the time that the manager allows
_STATUS_SECONDS = 5.0  # between two looks where no watchdog asks for more
_LOADING_SECONDS = 1.0


class Heartbeat:
    """Feeds the watchdog while the engine makes progress or has nothing to do; a hung step is not fed.

    name: what is served, for the status line; asked only once there is a model.
    """

    def __init__(self, notifier: Notifier, thread: EngineThread, name: Callable[[], str]) -> None:
        self._notifier = notifier
        self._thread = thread
        self._name = name
        self._fed = time.monotonic()
        self._stage: tuple[str, float | None] | None = None
        self._status = ""
        self._stopping = False

    async def run(self) -> None:
        """Until it is cancelled; returns at once where no manager listens."""
        while self._notifier.active:
            self.beat()
            await asyncio.sleep(self._pause())

    def beat(self) -> None:
        """One look at the engine, and what there is to say about it."""
        if self._thread.state is State.LOADING:
            self._loading()
        elif self._thread.state is State.READY:
            self._feed()
            self._say(self._serving())

    def ready(self) -> None:
        """Requests are answered from now on."""
        self._notifier.send("READY=1", f"STATUS={self._serving()}")
        self.beat()

    def stopping(self) -> None:
        """The process is on its way out, and may take as long as its answers."""
        self._stopping = True
        self._notifier.send("STOPPING=1", "STATUS=stopping: running answers may end")

    def _loading(self) -> None:
        """Every sign of progress buys as much time as the unit gives for the whole start."""
        if self._thread.stage == self._stage or self._stopping:
            return
        self._stage = stage, share = self._thread.stage
        self._notifier.extend_start(START_SECONDS)
        self._say(stage if share is None else f"{stage}: {share:.0%}")

    def _feed(self) -> None:
        """Progress since the last feed, or nothing to do: then silence would say that something hangs."""
        if self._notifier.watchdog_seconds is None:
            return
        if self._thread.open and self._thread.last_progress < self._fed:
            return
        self._fed = time.monotonic()
        self._notifier.send("WATCHDOG=1")

    def _serving(self) -> str:
        return f"serving {self._name()}: {self._thread.running} running, {self._thread.waiting} waiting"

    def _say(self, status: str) -> None:
        if status != self._status and not self._stopping:
            self._status = status
            self._notifier.send(f"STATUS={status}")

    def _pause(self) -> float:
        if self._thread.state is State.LOADING:
            return _LOADING_SECONDS
        watchdog = self._notifier.watchdog_seconds
        return min(_STATUS_SECONDS, watchdog / _FEEDS) if watchdog is not None else _STATUS_SECONDS
