"""One answer from as many replicas as it takes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

from strata.interfaces.ray_serve.local import Head
from strata.interfaces.ray_serve.resume import ResumedEvents
from strata.interfaces.server.errors import ApiError, unavailable

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.2
_log = logging.getLogger("ray.serve")


async def one_answer(
    ask: Callable[[], AsyncIterator[Head | bytes]],
    lost: tuple[type[Exception], ...],
    *,
    resumes: bool = True,
    pause: float = _PAUSE_SECONDS,
) -> AsyncIterator[Head | bytes]:
    """The head, then the body: a stream as it comes, anything else when all of it is there.

    ask: sends the request to some replica; its pieces. lost: what it raises when the replica is gone or takes
    nothing. resumes: the request has the same events anywhere (it has a seed); without that a stream that has
    begun cannot go on elsewhere. Raises ApiError (503) when nobody answers and nothing was sent; a stream
    that has begun ends with an error event then.
    """
    events, begun = ResumedEvents(), False
    for attempt in range(_ATTEMPTS):
        if begun and not resumes:
            break
        if attempt:
            await asyncio.sleep(pause * attempt)
            events.restart()
        head, whole = None, bytearray()
        try:
            async for piece in ask():
                if isinstance(piece, Head):
                    head = piece
                    if streams(head) and not begun:
                        begun = True
                        yield head
                elif head is not None and streams(head):
                    for event in events.add(piece) if resumes else [piece]:
                        yield event
                else:
                    whole += piece
        except lost as error:
            _log.warning("attempt %d: %s", attempt + 1, type(error).__name__)
            continue
        if head is not None and streams(head):
            return
        # 503: this replica is on its way out, another one may answer.
        if head is not None and not begun and (head.status != 503 or attempt == _ATTEMPTS - 1):
            yield head
            yield bytes(whole)
            return
    refusal = unavailable("no replica answered", "no_replica", 5)
    if not begun:
        raise refusal
    yield _last_event(refusal) if resumes else _last_message(refusal)


def _last_event(refusal: ApiError) -> bytes:
    return f"data: {json.dumps(refusal.content())}\n\ndata: [DONE]\n\n".encode()


def _last_message(refusal: ApiError) -> bytes:
    """In Anthropic's shape: /v1/messages has no seed."""
    content = {"type": "error", "error": {"type": "api_error", "message": str(refusal)}}
    return f"event: error\ndata: {json.dumps(content)}\n\n".encode()


def streams(head: Head) -> bool:
    """Whether events follow."""
    return head.headers.get("content-type", "").startswith("text/event-stream")
