"""The process: its parts, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import uvicorn

from strata.config import Config
from strata.interfaces.models import LoadedModel, open_model
from strata.interfaces.planning import check_models
from strata.interfaces.recording import Files, Recording
from strata.interfaces.server.app import build_app
from strata.interfaces.server.connection import BoundedProtocol
from strata.interfaces.server.heartbeat import Heartbeat
from strata.interfaces.server.listening import announce, api_keys, bind
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.service import Service
from strata.interfaces.server.warm_up import Report, warm_up_seconds
from strata.interfaces.server.worker import EngineThread, State
from strata.interfaces.start import describe_draft
from strata.interfaces.stores import named_model
from strata.interfaces.systemd.notify import Notifier

_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_SECONDS = 30
_LAST_WORDS_SECONDS = 3  # for connections to take the end of an answer, once nothing runs any more
_JOIN_SECONDS = 1.0
_NO_FILES = Files()


def serve(config: Config, files: Files = _NO_FILES) -> int:
    """Run the service until a signal ends it; the exit code. Raises what kept the model from loading, and
    before anything is said what is wrong with its files or its draft's.

    files: written while it serves, and whole when it ends in order.
    """
    notifier = Notifier.from_environment()
    log = RequestLog(as_json=config.server.log == "json")
    keys = api_keys(config)
    with contextlib.closing(bind(config.server.host, config.server.port)) as listener:
        named_model(config.model.path)
        check_models(config)  # before anybody is told that it listens
        return asyncio.run(_Process(config, listener, keys, log, files, notifier).run())


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own idea of an end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """Owns the engine thread and the HTTP server."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        keys: Sequence[str],
        log: RequestLog,
        files: Files,
        notifier: Notifier,
    ) -> None:
        self._config = config
        self._files = files
        self._notifier = notifier
        self._recording: Recording | None = None
        self._listener = listener
        self._keys = keys
        self._log = log
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """The exit code. Raises the engine thread's failure."""
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._load,
            loop.call_soon_threadsafe,
            warm_up_seconds=warm_up_seconds(self._config.server),
            on_ready=self._on_ready,
            on_end=self._on_end,
        )
        self._service = Service(self._config, self._thread)
        self._heartbeat = Heartbeat(self._notifier, self._thread, lambda: self._service.name)
        self._server = _Server(self._uvicorn_config())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        announce(self._log, self._config, self._listener, self._keys)
        self._thread.start()
        beats = loop.create_task(self._heartbeat.run())
        await self._server.serve(sockets=[self._listener])
        beats.cancel()
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, _JOIN_SECONDS):
            self._leave(0)  # it imports a model, or is in a long step: neither can be interrupted
        if self._recording is not None:
            self._recording.close()
        if self._thread.failure is not None:
            raise self._thread.failure
        self._log.event("stopped")
        return 0

    def _load(self, report: Report) -> LoadedModel:
        report("opening the model", None)
        model = open_model(
            self._config,
            progress=lambda done, total, what: report("importing the model", done / total if total else None),
        )
        self._recording = Recording(model.engine, model.plan, self._files)
        return model

    def _uvicorn_config(self) -> uvicorn.Config:
        BoundedProtocol.header_seconds = float(self._config.server.client_seconds)
        return uvicorn.Config(
            build_app(self._service, keys=self._keys, log=self._log),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self._config.server.connections,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )

    def _on_ready(self) -> None:
        if self._service.draining or self._thread.state is not State.READY:  # it may have died meanwhile
            return
        model = self._service.model
        options = model.engine.options
        fields = {"context": options.context, "kv_pages": options.pages, "page_tokens": options.page_tokens}
        self._log.event("ready", model=self._service.name, **fields)
        self._heartbeat.ready()
        if model.plan.draft is not None:
            self._log.event(f"draft {describe_draft(model.plan.draft)}")
        if model.numa_place:
            self._log.event(model.numa_place)
        if model.note:
            self._log.event(f"note: {model.note}")

    def _on_signal(self, number: int) -> None:
        """The first drains, the second does not wait for anything."""
        self._signals += 1
        if self._signals > 1:
            self._leave(128 + number)
        self._log.event("stopping", answers_running=len(self._thread.open), again="stops at once")
        self._service.draining = True
        self._heartbeat.stopping()
        self._drain = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        """Let answers end for drain_seconds, then end them."""
        deadline = asyncio.get_running_loop().time() + self._config.server.drain_seconds
        while self._thread.open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._thread.stop()
        self._server.should_exit = True

    def _on_end(self) -> None:
        """The engine thread is through: without it there is nothing to serve."""
        if self._thread.state is State.DEAD:
            self._log.event("the engine has stopped", error=type(self._thread.failure).__name__)
        self._server.should_exit = True

    def _leave(self, code: int) -> NoReturn:
        """Without waiting for the engine's thread, which may be in the middle of a long step."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
