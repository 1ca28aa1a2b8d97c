"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from strata.core import Constraint
from strata.interfaces.models import TextStream
from strata.interfaces.server.constraints import wanted_grammar
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
    service.admit()
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


async def _start(service: Service, body: CompletionBody) -> Call:
    model = service.model
    prompts = await service.in_thread("prompt", completion_prompts, model, body)
    if len(prompts) * body.choices > MAX_ANSWERS:
        count = f"{len(prompts)} prompts with n = {body.choices}"
        raise bad_request(f"{count} are more than {MAX_ANSWERS} answers", "prompt")
    constraint = await _constraints(service, body)
    sampling, bias = sampling_of(body, service.config.sampling), bias_of(body, model)
    choices: list[Choice] = []
    for prompt in prompts:
        for number in range(body.choices):
            request = service.request(prompt, sampling, number, bias, body.logprobs)
            request.constraint, request.priority = constraint(), body.priority or 0
            request.scored = bool(body.echo) and body.logprobs is not None
            text = TextStream(model.tokenizer, sampling.stop, continuation=True)
            choices.append(Choice(len(choices), request, text, PlainOutput()))
    return service.call(choices, "prompt")


async def _constraints(service: Service, body: CompletionBody) -> Callable[[], Constraint | None]:
    """Makes one for each choice."""
    wanted = await service.in_thread("grammar", wanted_grammar, body)
    if wanted is None:
        return lambda: None
    grammars = service.model.grammars
    return await service.in_thread(wanted.param, lambda: grammars.compiled(grammars.alone(wanted.grammar)))


class CompletionWriter:
    """Puts a call's pieces into OpenAI's shape: one by one, or all together."""

    def __init__(self, service: Service, call: Call, body: CompletionBody) -> None:
        self._head = head(service, "cmpl", "text_completion")
        self._call = call
        self._tokenizer = service.model.tokenizer
        self._echo = bool(body.echo)
        self._logprobs = (
            None if body.logprobs is None else [TextLogprobs(self._tokenizer) for _ in call.choices]
        )
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._begun: set[int] = set()

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(Piece(choice.index)) for choice in self._call.choices]
        async for piece in self._call.pieces():
            for news in self._news(piece):
                choice = choices[news["index"]]
                choice["text"] += news["text"]
                choice["finish_reason"] = news["finish_reason"]
                for name, values in (news["logprobs"] or {}).items():
                    choice["logprobs"][name] += values
        return {**self._head, "choices": choices, "usage": usage(self._call)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, without the last one, [DONE]."""
        extra = {"usage": None} if self._with_usage else {}
        async with contextlib.aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                if piece is IDLE:
                    yield KEEP_ALIVE
                for news in self._news(piece):
                    yield event({**self._head, "choices": [news], **extra})
        if self._with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._call)})

    def _news(self, piece: Piece) -> list[dict[str, Any]]:
        """The piece, and before a choice's first one the prompt, where it is wanted back."""
        if piece is IDLE:
            return []
        echo = [self._prompt(piece.index)] if self._echo and piece.index not in self._begun else []
        self._begun.add(piece.index)
        return [*echo, self._choice(piece)]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        text = "".join(part.text for part in piece.parts)
        lists = None if self._logprobs is None else self._logprobs[piece.index].take(piece.logprobs)
        return {"index": piece.index, "text": text, "logprobs": lists, "finish_reason": piece.finish}

    def _prompt(self, index: int) -> dict[str, Any]:
        """The prompt as a piece of the answer; nothing is known of its first token's probability."""
        request = self._call.choices[index].request
        text = self._tokenizer.decode(request.prompt, skip_special=False)
        lists = None
        if self._logprobs is not None:
            scores = zip(request.prompt, [None, *request.scores], strict=True)
            lists = self._logprobs[index].take(list(scores))
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": None}
