"""The HTTP application: routes, their documentation, and errors in OpenAI's shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from strata import __version__
from strata.interfaces.server import replies
from strata.interfaces.server.anthropic.errors import PREFIX, content_for
from strata.interfaces.server.anthropic.messages import count_tokens, message
from strata.interfaces.server.anthropic.schema import (
    CountBody,
    CountReply,
    MessageReply,
    MessagesBody,
    MessagesErrorReply,
)
from strata.interfaces.server.chat import chat_completion
from strata.interfaces.server.completions import completion
from strata.interfaces.server.errors import ApiError, ErrorResponse, api_error, validation_error
from strata.interfaces.server.gate import CLIENT_LEFT, Gate
from strata.interfaces.server.health import health
from strata.interfaces.server.json_body import JsonRoute
from strata.interfaces.server.listening import is_loopback
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.metrics import CONTENT_TYPE
from strata.interfaces.server.page import page_files, page_response
from strata.interfaces.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from strata.interfaces.server.service import Service
from strata.interfaces.server.sse import ClientGoneError
from strata.interfaces.server.stats import Stats
from strata.interfaces.server.tokenizing import detokenize, tokenize

_ERRORS = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    403: "The Host header names another machine",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "Too many requests wait",
    500: "A fault of the server",
    503: "Loading, shutting down, or the engine has stopped",
    504: "The answer took too long",
}


def build_app(service: Service, *, keys: Sequence[str] = (), log: RequestLog | None = None) -> Gate:
    """The application with its gate. keys: API keys, any of which lets a client in."""
    config = service.config.server
    app = FastAPI(title="Strata", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    _add_errors(app)
    _add_answers(app, service)
    _add_messages(app, service)
    _add_texts(app, service)
    _add_state(app, service)
    _add_page(app, service)
    inner: Any = app
    if config.cors:
        inner = CORSMiddleware(app, config.cors, allow_methods=["*"], allow_headers=["*"])
    return Gate(
        inner,
        service.metrics,
        log or RequestLog(),
        keys=keys,
        any_host=not is_loopback(config.host),
        body_bytes=config.body,
        body_seconds=float(config.client_seconds),
        paths=frozenset(route.path for route in app.routes if hasattr(route, "path")),
    )


def _responses(*statuses: int, ok: Any = None) -> dict[int | str, dict[str, Any]]:
    """For /openapi.json."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses
    }
    # FastAPI would document its own shape of validation errors; here they are 400.
    found |= {"4XX": {"model": ErrorResponse, "description": "Any other fault of the request"}}
    return found | ({200: ok} if ok else {})


_ALWAYS = (401, 403)
_WITH_BODY = (400, *_ALWAYS, 408, 413, 415, 500, 503)


def _add_answers(app: FastAPI, service: Service) -> None:
    def ok(model: Any, what: str) -> dict[str, Any]:
        # No schema: OpenAPI 3.1 cannot say that every event's data has one.
        stream = {"example": "data: {...}\n\ndata: [DONE]\n\n"}
        return {"model": model, "content": {"text/event-stream": stream}, "description": what}

    chat = ok(replies.ChatReply, "The answer, or with `stream` its chunks as events")
    text = ok(replies.TextReply, "The answer, or with `stream` its chunks as events")

    @app.post("/v1/chat/completions", responses=_responses(*_WITH_BODY, 429, 504, ok=chat))
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        """The next message of a conversation."""
        return await chat_completion(service, body, http)

    @app.post("/v1/completions", responses=_responses(*_WITH_BODY, 429, 504, ok=text))
    async def completions(body: CompletionBody, http: Request) -> Response:
        """How a text goes on. Control tokens in the prompt count."""
        return await completion(service, body, http)


def _add_messages(app: FastAPI, service: Service) -> None:
    def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
        found = _responses(*statuses)
        return {status: {**answer, "model": MessagesErrorReply} for status, answer in found.items()}

    stream = {"example": "event: message_start\ndata: {...}\n\n"}
    whole = {"model": MessageReply, "description": "The message, or with `stream` its events"}
    answer: dict[int | str, dict[str, Any]] = {200: {**whole, "content": {"text/event-stream": stream}}}
    counted: dict[int | str, dict[str, Any]] = {200: {"model": CountReply, "description": "Tokens"}}

    @app.post(PREFIX, responses={**faults(*_WITH_BODY, 429, 504), **answer})
    async def messages(body: MessagesBody, http: Request) -> Response:
        """The next message of a conversation, in Anthropic's shape."""
        return await message(service, body, http)

    @app.post(f"{PREFIX}/count_tokens", responses={**faults(*_WITH_BODY), **counted})
    async def messages_tokens(body: CountBody) -> Response:
        """How many tokens a conversation has."""
        return JSONResponse(await count_tokens(service, body))


def _add_texts(app: FastAPI, service: Service) -> None:
    tokens = {"model": replies.TokenizeReply, "description": "Token ids"}
    text = {"model": replies.DetokenizeReply, "description": "Text"}

    @app.post("/tokenize", responses=_responses(*_WITH_BODY, ok=tokens))
    async def tokenize_text(body: TokenizeBody) -> Response:
        """Token ids of a text, or of a conversation."""
        return JSONResponse(await tokenize(service, body))

    @app.post("/detokenize", responses=_responses(*_WITH_BODY, ok=text))
    async def detokenize_tokens(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        return JSONResponse(await detokenize(service, body))


def _add_state(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        facts = {"created": service.created, "owned_by": "strata", "max_model_len": service.model.context}
        return {"id": service.name, "object": "model", **facts}

    @app.get("/v1/models", responses=_responses(*_ALWAYS, 503), response_model=replies.ModelList)
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}", responses=_responses(*_ALWAYS, 503), response_model=replies.ModelCard)
    async def model(name: str) -> Response:
        """The model, if that is its name, or what it was started by; the answer has its name."""
        if name not in service.names:
            raise ApiError(404, f"there is no model of that name; {service.name} is served", param="model")
        return JSONResponse(card())

    unhealthy: dict[int | str, dict[str, Any]] = {
        503: {"model": replies.Health, "description": "Not ready; `status` says why"}
    }

    @app.get("/health", responses={**_responses(403), **unhealthy}, response_model=replies.Health)
    async def health_state() -> Response:
        """Whether requests are answered and tokens come. Needs no key."""
        state = health(service)
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    app.add_api_route("/health", health_state, methods=["HEAD"], include_in_schema=False)

    @app.get("/metrics", responses=_responses(*_ALWAYS), response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _add_page(app: FastAPI, service: Service) -> None:
    stats = Stats(service)

    @app.get("/stats", responses=_responses(*_ALWAYS), response_model=replies.Stats)
    async def figures() -> Response:
        """Requests, tokens, water levels and experts at this moment; what the page's live view shows."""
        return JSONResponse(stats.now())

    for path, (content, kind) in page_files().items():
        answer = functools.partial(page_response, content, kind)
        app.add_api_route(
            path, answer, methods=["GET", "HEAD"], include_in_schema=False, response_class=Response
        )


def _add_errors(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        shown = api_error(error)
        content = content_for(request.url.path, shown)
        return JSONResponse(content, shown.status, headers=shown.headers)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_api_error(request, validation_error(list(error.errors())))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        shown = ApiError(error.status_code, str(error.detail))
        shown.headers.update(error.headers or {})
        return await on_api_error(request, shown)

    async def on_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(Exception, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGoneError, on_gone)
