"""One replica's server: the HTTP application of `strata serve` without sockets, in a thread with a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.config import Config
from strata.interfaces.models import open_model
from strata.interfaces.server.app import build_app
from strata.interfaces.server.health import health
from strata.interfaces.server.listening import api_keys
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.service import Service
from strata.interfaces.server.warm_up import warm_up_seconds
from strata.interfaces.server.worker import EngineThread, State

_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Wire:
    """A request as it came. headers: lower-case names."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]


class LocalServer:
    """Loads the model when it is made. Raises what kept it from loading."""

    def __init__(self, config: Config) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._loop_thread.start()
        loaded = threading.Event()
        self._thread = EngineThread(
            lambda report: open_model(config),
            self._loop.call_soon_threadsafe,
            warm_up_seconds=warm_up_seconds(config.server),
            on_ready=loaded.set,
            on_end=loaded.set,
        )
        self._service = Service(config, self._thread)
        log = RequestLog(as_json=config.server.log == "json")
        self._app = build_app(self._service, keys=api_keys(config), log=log)
        self._thread.start()
        loaded.wait()
        if self._thread.failure is not None:
            raise self._thread.failure

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._thread.open)

    def check(self) -> None:
        """Raises RuntimeError when no tokens would come: the replica must be replaced."""
        state = health(self._service)
        if self._thread.state is not State.READY or state["status"] == "degraded":
            raise RuntimeError(f"not healthy: {state}")

    async def answer(self, wire: Wire) -> AsyncIterator[Head | bytes]:
        """The head, then pieces of the body. Closing it early is the client that leaves."""
        outer = asyncio.get_running_loop()
        pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
        left, whole = asyncio.Event(), threading.Event()

        async def send(message: Mapping[str, Any]) -> None:
            piece: Head | bytes = message.get("body", b"")
            if message["type"] == "http.response.start":
                headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
                piece = Head(message["status"], headers)
            elif not message.get("more_body"):
                whole.set()
            outer.call_soon_threadsafe(pieces.put_nowait, piece)

        work = asyncio.run_coroutine_threadsafe(
            self._app(_scope(wire), _receive(wire, left), send), self._loop
        )
        work.add_done_callback(lambda _: outer.call_soon_threadsafe(pieces.put_nowait, None))
        try:
            while (piece := await pieces.get()) is not None:
                if piece:
                    yield piece
            if not whole.is_set():
                work.result()  # raises what broke the app, which must not look like the answer's end
        finally:
            self._loop.call_soon_threadsafe(left.set)

    def close(self) -> None:
        """End what runs."""
        self._thread.stop()
        self._thread.join(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


def _receive(wire: Wire, left: asyncio.Event) -> Any:
    first = [{"type": "http.request", "body": wire.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if first:
            return first.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


def _scope(wire: Wire) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": wire.method,
        "scheme": "http",
        "path": wire.path,
        "raw_path": wire.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in wire.headers.items()],
        "client": None,
        "server": ("ray", 0),
    }
