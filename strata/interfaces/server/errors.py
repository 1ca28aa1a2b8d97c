"""What goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from strata.errors import ContextOverflowError, RequestError, StrataError


class ErrorBody(BaseModel):
    """message: for people. param: the field at fault. code: for programs, where there is one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """What every answer with a status of 400 or more holds."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with `status`; retry_after: seconds after which another attempt makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        shown, field = _encodable(message), _encodable(param)
        self.body = ErrorResponse(error=ErrorBody(message=shown or "", type=kind, param=field, code=code))
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def content(self) -> dict[str, Any]:
        """The JSON body."""
        return self.body.model_dump()


def _encodable(text: str | None) -> str | None:
    """Without half surrogate pairs: a key of the client's body may have some."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str = "") -> ApiError:
    """400 for something that exists elsewhere and would change the answer: it is never just ignored."""
    return bad_request(what or f"{param} is not supported by this server", param, "unsupported_parameter")


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """Status 503."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Any error as what the client gets. What is no fault of the client's is 500 and says little."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        # OpenAI's words: litellm and agents that shorten their prompts look for them, not for the code.
        limit = f"This model's maximum context length is {error.context_tokens} tokens"
        return bad_request(f"{limit}: {error.cause}", param, "context_length_exceeded")
    if isinstance(error, RequestError):
        remedy = f" ({error.remedy})" if error.remedy else ""
        return bad_request(f"{error.cause}{remedy}", param)
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    message = error.cause if isinstance(error, StrataError) else "internal error"
    return ApiError(500, message, kind="server_error")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints. The value itself is not repeated: it may be long, or no text."""
    first: dict[str, Any] = errors[0] if errors else {"loc": (), "msg": "invalid"}
    places = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if not places:
        return bad_request(f"the body: {first['msg']}")
    where = str(places[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in places[1:])
    return bad_request(f"{where}: {first['msg']}", str(places[0]))
