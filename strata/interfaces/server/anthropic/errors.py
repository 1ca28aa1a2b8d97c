"""Errors in the shape of the API that was asked."""

from __future__ import annotations

from typing import Any

from strata.interfaces.server.errors import ApiError

PREFIX = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(error: ApiError) -> dict[str, Any]:
    """In Anthropic's shape."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body.error.message}}


def content_for(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON of an error, as clients of that path expect it."""
    return error_content(error) if path == PREFIX or path.startswith(f"{PREFIX}/") else error.content()
