"""A call's answer onto the connection: whole or streamed, ended when the client leaves, logged once."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from strata.interfaces.server.errors import ApiError
from strata.interfaces.server.generation import Call
from strata.interfaces.server.service import Service
from strata.interfaces.server.sse import DONE, EventStream, LastEvents, failure_event, while_connected

LOG_FIELDS = "strata.log"
"""Key of the ASGI scope: what the request's log line says beside the HTTP part."""
_IGNORED_HEADER = "x-ignored-parameters"
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


async def whole_answer(
    service: Service, http: HttpRequest, call: Call, unknown: Sequence[str], result: Coroutine[Any, Any, Any]
) -> Response:
    """The result as JSON. Raises ClientGoneError when the client leaves first; the call ends then."""
    try:
        content = await while_connected(http.receive, result)
    finally:
        call.close()
        finish(service, http, call)
    return JSONResponse(content, headers=headers(unknown))


def streamed_answer(
    service: Service,
    http: HttpRequest,
    call: Call,
    unknown: Sequence[str],
    events: AsyncGenerator[bytes, None],
    *,
    end: bytes = DONE,
    failed: Callable[[ApiError], bytes] = failure_event,
) -> Response:
    """The events as they come. end: the last one; failed: the one for an error."""

    def over(_: BaseException | None) -> None:
        call.close()
        finish(service, http, call)

    seconds = float(service.config.server.client_seconds)
    last = LastEvents(end, failed)
    return EventStream(events, headers=headers(unknown), client_seconds=seconds, end=over, last=last)


def finish(service: Service, http: HttpRequest, call: Call) -> None:
    """Count the answer and note for the log line how it went."""
    service.ended(call)
    timing = call.timing
    http.scope.setdefault(LOG_FIELDS, {}).update(
        outcome=call.outcome,
        prompt_tokens=call.prompt_tokens,
        shared_tokens=call.shared_tokens,
        answer_tokens=call.completion_tokens,
        first_token_s=None if timing.first is None else round(timing.first, 4),
        answer_s=None if timing.total is None else round(timing.total, 4),
    )


def headers(unknown: Sequence[str]) -> dict[str, str]:
    """Names of parameters that nobody knows, so that a typo does not go unnoticed."""
    names = [name for name in unknown if _NAME.fullmatch(name)]  # a header may not hold everything
    return {_IGNORED_HEADER: ", ".join(names[:16])} if names else {}
