"""How bodies are read: the JSON of `strict_json`, and a cause where it is none."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from strata.interfaces.strict_json import JsonError, read_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """HTTPException, because FastAPI makes one without a cause of all others."""
        try:
            return read_json(await self.body())
        except JsonError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None


class JsonRoute(APIRoute):
    """For `FastAPI.router.route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read
