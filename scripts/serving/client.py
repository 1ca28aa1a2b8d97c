"""A small HTTP client on asyncio streams: times every event, and may leave whenever it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

_LIMIT = 1 << 24  # bytes of a line
_SECONDS = 600.0  # against a server that never answers


@dataclass
class Answer:
    """status 0: the client left before there was one. events: of a stream, without [DONE]; times: of each,
    seconds of time.perf_counter. done: the stream had its [DONE]."""

    begin: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False
    end: float = 0.0

    @property
    def json(self) -> Any:
        """The body of an answer that is no stream."""
        return json.loads(self.body)

    def texts(self) -> list[tuple[float, str]]:
        """When pieces of text came, and what they were; chat and completions."""
        found = []
        for moment, event in zip(self.times, self.events, strict=True):
            for choice in event.get("choices") or []:
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    found.append((moment, text))
        return found


def raw_request(
    host: str, path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST"
) -> bytes:
    """A request as it goes over the wire; the server closes the connection after its answer."""
    given = {"content-type": "application/json", **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close"]
    lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Client:
    """Asks one server; every request has a connection of its own."""

    host: str
    port: int

    async def post(self, path: str, body: dict[str, Any] | bytes, **options: Any) -> Answer:
        """options: as for `ask`, and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask(raw_request(self.host, path, data, options.pop("headers", None)), **options)

    async def get(self, path: str) -> Answer:
        """Without a body."""
        return await self.ask(raw_request(self.host, path, b"", method="GET"))

    async def ask(self, request: bytes, *, leave_after: int | None = None) -> Answer:
        """leave_after: events until the client closes the connection; 0: as soon as it has asked.

        Raises OSError and asyncio.TimeoutError.
        """
        return await asyncio.wait_for(self._ask(request, leave_after), _SECONDS)

    async def _ask(self, request: bytes, leave_after: int | None) -> Answer:
        answer = Answer(time.perf_counter())
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LIMIT)
        try:
            writer.write(request)
            await writer.drain()
            if leave_after != 0:
                await _read(reader, answer, leave_after)
            answer.end = time.perf_counter()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").rstrip().split("\r\n")
    answer.status = int(status.split(" ")[1])
    answer.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        answer.body = b"".join([piece async for piece in _pieces(reader, answer.headers)])
        return
    rest = b""
    async for piece in _pieces(reader, answer.headers):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            _take(event, answer)
        if leave_after is not None and len(answer.events) >= leave_after:
            return


def _take(event: bytes, answer: Answer) -> None:
    if not event.startswith(b"data: "):  # a comment that keeps the connection alive
        return
    if event == b"data: [DONE]":
        answer.done = True
        return
    answer.events.append(json.loads(event[6:]))
    answer.times.append(time.perf_counter())


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes. Raises asyncio.IncompleteReadError when it ends too early."""
    if headers.get("transfer-encoding") != "chunked":
        if "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
