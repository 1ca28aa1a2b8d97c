"""What a single connection may do before it has asked anything."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """Closes connections on which no complete request header comes in time (uvicorn waits for ever)."""

    header_seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        """asyncio.Protocol."""
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol."""
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_header(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
