"""Answers that stop when the client leaves, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata.interfaces.server.errors import ApiError

Result = TypeVar("Result")
KEEP_ALIVE = b": waiting\n\n"


class ClientGoneError(Exception):
    """The client closed the connection, or stopped reading for too long."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves; then raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Mapping[str, Any]) -> bytes:
    """One event with JSON in one line."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def failure_event(error: ApiError) -> bytes:
    """An error in OpenAI's shape."""
    return event(error.content())


class LastEvents(NamedTuple):
    """How a stream ends. end: always its last bytes; failed: before them, when an error ended the answer."""

    end: bytes = DONE
    failed: Callable[[ApiError], bytes] = failure_event


_OPENAI = LastEvents()


class EventStream(Response):
    """Sends events as they come. `end` is called when it is over, with None or what ended it early.

    events: must end cleanly when closed. client_seconds: how long the client may take to accept a piece.
    An ApiError in the middle becomes an event of its own, then the stream ends as usual: its status is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        client_seconds: float,
        end: Callable[[BaseException | None], None] = lambda error: None,
        last: LastEvents = _OPENAI,
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._client_seconds = client_seconds
        self._end = end
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        failure: BaseException | None = None
        try:
            failure = await while_connected(receive, self._send_all(send))
        except BaseException as error:
            failure = error
            if not isinstance(error, ClientGoneError):
                raise
        finally:
            self._end(failure)

    async def _send_all(self, send: Send) -> ApiError | None:
        """The whole response; returns the error that ended the answer early."""
        failure: ApiError | None = None
        async with contextlib.aclosing(self._events) as events:
            await self._send(
                send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            try:
                async for piece in events:
                    await self._send(send, _body(piece))
            except ApiError as error:
                failure = error
        if failure is not None:
            await self._send(send, _body(self._last.failed(failure)))
        if self._last.end:
            await self._send(send, _body(self._last.end))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        return failure

    async def _send(self, send: Send, message: Any) -> None:
        """Raises ClientGoneError when the client takes too long.

        A timer and not asyncio.wait_for, which makes a task of every piece before Python 3.12.
        """
        task, stalled = asyncio.current_task(), False
        assert task is not None  # whoever awaits this runs in one

        def give_up() -> None:
            nonlocal stalled
            stalled = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._client_seconds, give_up)
        try:
            await send(message)
        except OSError:
            raise ClientGoneError from None
        except asyncio.CancelledError:
            if stalled:
                raise ClientGoneError from None
            raise
        finally:
            timer.cancel()


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
