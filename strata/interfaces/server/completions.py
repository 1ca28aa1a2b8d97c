"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from strata.interfaces.models import TextStream
from strata.interfaces.server.errors import bad_request, not_supported
from strata.interfaces.server.generation import IDLE, Call, Choice, Piece
from strata.interfaces.server.logprobs import TextLogprobs
from strata.interfaces.server.output import PlainOutput
from strata.interfaces.server.schema import CompletionBody
from strata.interfaces.server.service import Service, head, usage
from strata.interfaces.server.sse import KEEP_ALIVE, event
from strata.interfaces.server.text import bias_of, check_parameters, completion_prompts, sampling_of
from strata.interfaces.server.transport import streamed_answer, whole_answer

MAX_ANSWERS = 1024
"""Prompts times n of one request."""


async def completion(service: Service, body: CompletionBody, http: HttpRequest) -> Response:
    """The whole way of a completion. Raises ApiError before anything is sent where something is wrong."""
    unknown = check_parameters(body)
    _check(body)
    call = await _start(service, body)
    writer = CompletionWriter(service, call, body)
    if body.stream:
        return streamed_answer(service, http, call, unknown, writer.events())
    return await whole_answer(service, http, call, unknown, writer.whole())


def _check(body: CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream", "stream_options")
    if body.best_of is not None and body.best_of != body.choices:
        raise not_supported("best_of", "best_of other than n is not supported")
    if body.echo and body.logprobs is not None:
        raise not_supported("echo", "echo with logprobs is not supported")


async def _start(service: Service, body: CompletionBody) -> Call:
    model = service.model
    prompts = await service.in_thread("prompt", completion_prompts, model, body)
    if len(prompts) * body.choices > MAX_ANSWERS:
        count = f"{len(prompts)} prompts with n = {body.choices}"
        raise bad_request(f"{count} are more than {MAX_ANSWERS} answers", "prompt")
    sampling, bias = sampling_of(body, service.config.sampling), bias_of(body, model)
    choices: list[Choice] = []
    for prompt in prompts:
        for number in range(body.choices):
            request = service.request(prompt, sampling, number, bias, body.logprobs)
            text = TextStream(model.tokenizer, sampling.stop, continuation=True)
            choices.append(Choice(len(choices), request, text, PlainOutput()))
    return service.call(choices, "prompt")


class CompletionWriter:
    """Puts a call's pieces into OpenAI's shape: one by one, or all together."""

    def __init__(self, service: Service, call: Call, body: CompletionBody) -> None:
        self._head = head(service, "cmpl", "text_completion")
        self._call = call
        tokenizer = service.model.tokenizer
        self._before = [
            tokenizer.decode(choice.request.prompt, skip_special=False) if body.echo else ""
            for choice in call.choices
        ]
        self._logprobs = (
            None if body.logprobs is None else [TextLogprobs(tokenizer, len(text)) for text in self._before]
        )
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(index, text) for index, text in enumerate(self._before)]
        async for piece in self._call.pieces():
            if piece is IDLE:
                continue
            choice = choices[piece.index]
            choice["text"] += _text(piece)
            choice["finish_reason"] = piece.finish
            for name, values in (self._lists(piece) or {}).items():
                choice["logprobs"][name] += values
        return {**self._head, "choices": choices, "usage": usage(self._call)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, without the last one, [DONE]."""
        for index, text in enumerate(self._before):
            if text:
                yield self._chunk(self._choice(index, text))
        async with contextlib.aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                if piece is IDLE:
                    yield KEEP_ALIVE
                    continue
                choice = self._choice(piece.index, _text(piece))
                yield self._chunk({**choice, "logprobs": self._lists(piece), "finish_reason": piece.finish})
        if self._with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._call)})

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        lists = self._lists(Piece(index))
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        extra = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [choice], **extra})

    def _lists(self, piece: Piece) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[piece.index].take(piece.logprobs)


def _text(piece: Piece) -> str:
    return "".join(part.text for part in piece.parts)
