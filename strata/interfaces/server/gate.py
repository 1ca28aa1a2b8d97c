"""What stands before every endpoint: who may come in, how much they may send, how long they may take.

Outermost, so that it also sees what goes wrong inside. Writes the one log line of a request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.interfaces.server.anthropic.errors import content_for
from strata.interfaces.server.errors import ApiError, api_error
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.metrics import ServerMetrics
from strata.interfaces.server.page import page_files
from strata.interfaces.server.transport import LOG_FIELDS

OPEN_PATHS = frozenset(("/", "/health", *page_files()))
"""Paths that need no key: they say nothing about what anybody asked. The page asks its user for the key."""
_METHODS_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_DIGITS = 20  # of a length: more are too many bytes in any case, and thousands no number for int()
CLIENT_LEFT = 499  # nginx's number for it; nobody gets it


class Gate:
    """Wraps an ASGI application.

    keys: API keys, one of which a client must show; none: everybody may come in, but from a web page of
    another name only if `any_host` (a page can make its own name point to this machine). body_bytes: the most
    a body may have; body_seconds: the most it may take to arrive. paths: label values for the metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        log: RequestLog,
        *,
        keys: Sequence[str],
        any_host: bool,
        body_bytes: int,
        body_seconds: float,
        paths: frozenset[str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._keys = [key.encode() for key in keys]
        self._any_host = any_host
        self._body_bytes = body_bytes
        self._body_seconds = body_seconds
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, seen = time.perf_counter(), _Seen(send)
        try:
            await self._enter(scope, receive, seen)
        except Exception as error:
            # Where, but not what: a message may hold a part of the body.
            frames = "".join(traceback.format_tb(error.__traceback__))
            self._log.fault(f"{type(error).__name__} in {scope['path']}\n{frames}")
            if seen.status is None:
                await _refuse(api_error(error), scope, receive, seen)
        finally:
            status = seen.status or CLIENT_LEFT
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._log.request(scope, status, time.perf_counter() - begin, scope.get(LOG_FIELDS, {}))

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            if scope["method"] in _METHODS_WITH_BODY:
                self._check_body_headers(headers)
                receive = _replayed(await self._body(receive), receive)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Without a key, the browser of this machine's user must not be used by a page from elsewhere."""
        if self._any_host or self._keys or is_this_machine(headers.get(b"host", b"").decode("latin-1")):
            return
        message = "the Host header names another machine; use localhost or an IP address, or set an API key"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Compares in constant time, and with every key there is."""
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    def _check_body_headers(self, headers: Mapping[bytes, bytes]) -> None:
        """JSON only: a page from elsewhere can send other types without asking first."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            shown = kind.decode("latin-1")[:64] or "missing"
            raise ApiError(415, f"the content type is {shown}, send application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:_DIGITS]) > self._body_bytes:
            raise self._too_large(int(length[:_DIGITS]))

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more, {self._body_bytes} are allowed"
        return ApiError(413, message, code="body_too_large")

    async def _body(self, receive: Receive) -> bytes:
        try:
            return await asyncio.wait_for(self._read(receive), self._body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._body_seconds:g} s") from None

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(CLIENT_LEFT, "the client left")
            body += message.get("body", b"")
            if len(body) > self._body_bytes:
                raise self._too_large(len(body))
            if not message.get("more_body", False):
                return bytes(body)


def is_this_machine(host: str) -> bool:
    """Whether a Host header is an IP address or localhost, with or without a port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", "") or name.lower().endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Seen:
    """A `send` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Any) -> None:
    """The connection is closed after a body that was not read to its end."""
    headers = {**error.headers, "connection": "close"} if error.status in (408, 413) else error.headers
    await JSONResponse(content_for(scope["path"], error), error.status, headers=headers)(scope, receive, send)
