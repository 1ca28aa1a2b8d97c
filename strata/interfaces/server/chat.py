"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from strata.core import Constraint
from strata.interfaces.models import TextStream
from strata.interfaces.server.constraints import (
    Wanted,
    chat_source,
    must_call,
    required_tools,
    wanted_grammar,
)
from strata.interfaces.server.errors import bad_request
from strata.interfaces.server.generation import IDLE, Call, Choice, Piece
from strata.interfaces.server.logprobs import chat_logprobs
from strata.interfaces.server.output import CallDelta, Part
from strata.interfaces.server.reasoning_budget import reasoning_of, with_budget
from strata.interfaces.server.schema import ChatBody
from strata.interfaces.server.service import Service, head, usage
from strata.interfaces.server.sse import KEEP_ALIVE, event
from strata.interfaces.server.text import (
    bias_of,
    chat_messages,
    chat_prompt,
    check_parameters,
    sampling_of,
    template_variables,
)
from strata.interfaces.server.transport import streamed_answer, whole_answer


async def begin_chat(service: Service, body: ChatBody) -> tuple[Call, list[str]]:
    """The running call, and the parameters that nobody knows. Raises ApiError where something is wrong."""
    unknown = check_parameters(body)
    _check(body)
    service.admit()
    tools = await visible_tools(service, body)
    if body.tools and not tools and body.tool_choice != "none":
        unknown = ["tools", *unknown]  # the model would never see them
    return await _start(service, body, tools), unknown


async def chat_completion(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    """The whole way of a chat request. Raises ApiError before anything is sent where something is wrong."""
    call, unknown = await begin_chat(service, body)
    writer = ChatWriter(service, call, body)
    if body.stream:
        return streamed_answer(service, http, call, unknown, writer.events())
    return await whole_answer(service, http, call, unknown, writer.whole())


def _check(body: ChatBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream", "stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")


async def visible_tools(service: Service, body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model gets to see and whose calls can be read.

    One that must be called can always be read; a model whose template takes no tools does not see it.
    """
    if must_call(body):
        return required_tools(body)
    if not body.tools or body.tool_choice == "none" or service.answer_format.name is None:
        return []
    takes_tools = await service.in_thread("tools", lambda: service.model.format.takes_tools)
    return [tool.model_dump(exclude_unset=True) for tool in body.tools] if takes_tools else []


async def _start(service: Service, body: ChatBody, tools: list[dict[str, Any]]) -> Call:
    model = service.model
    variables, messages = template_variables(body), chat_messages(body)
    wanted = await service.in_thread("grammar", wanted_grammar, body)
    given = (model, messages, tools or None, variables)
    written, prompt = await service.in_thread("messages", chat_prompt, *given)
    param = wanted.param if wanted else "tools"
    constraint = await service.in_thread(param, _constraints, service, body, written, tools, wanted)
    sampling, bias = sampling_of(body, service.config.sampling), bias_of(body, model)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    choices = []
    for index in range(body.choices):
        request = service.request(prompt, sampling, index, bias, logprobs)
        request.constraint, request.priority = constraint(), body.priority or 0
        text = TextStream(model.tokenizer, sampling.stop, continuation=False, shown=service.shown_ids)
        parser = service.answer_format.parser(written, tools, must_call=must_call(body))
        choices.append(Choice(index, request, text, parser, 1 if body.parallel_tool_calls is False else None))
    return service.call(choices, "messages")


def _constraints(
    service: Service, body: ChatBody, prompt: str, tools: list[dict[str, Any]], wanted: Wanted | None
) -> Callable[[], Constraint | None]:
    """Makes one for each choice. Compiles the grammar, which may take a second: not in the event loop."""
    model, form = service.model, service.answer_format
    source = chat_source(model, form, body, prompt, tools, wanted)
    makes: Callable[[], Constraint | None] = model.grammars.compiled(source) if source else lambda: None
    budget, limits = body.thinking_token_budget, (body.max_tokens, body.max_completion_tokens)
    if budget is None or budget >= min(model.context, *(limit for limit in limits if limit is not None)):
        return makes  # without a budget a token is cheaper
    reasoning = reasoning_of(form, model.format, prompt, tools=bool(tools))
    return with_budget(model, reasoning, budget, makes) if reasoning else makes


@dataclass
class _Message:
    """What came of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def add(self, part: Part) -> None:
        self.text += part.text
        self.reasoning += part.reasoning
        if part.call is not None:
            self._add_call(part.call)

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        self.calls[delta.call]["function"]["arguments"] += delta.arguments

    def content(self) -> dict[str, Any]:
        """As OpenAI has it; keys without a value that most answers lack are left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return message


class ChatWriter:
    """Puts a call's pieces into OpenAI's shape: one by one, or all together."""

    def __init__(self, service: Service, call: Call, body: ChatBody) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head(service, "chatcmpl", kind)
        self._tokenizer = service.model.tokenizer
        self._call = call
        self._with_logprobs = bool(body.logprobs)
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        messages = [_Message() for _ in self._call.choices]
        async for piece in self._call.pieces():
            if piece is not IDLE:
                self._take(messages[piece.index], piece)
        choices = [
            {
                "index": index,
                "message": message.content(),
                "logprobs": {"content": message.logprobs} if self._with_logprobs else None,
                "finish_reason": message.finish,
            }
            for index, message in enumerate(messages)
        ]
        return {**self._head, "choices": choices, "usage": usage(self._call)}

    def _take(self, message: _Message, piece: Piece) -> None:
        for part in piece.parts:
            message.add(part)
        message.logprobs += chat_logprobs(self._tokenizer, piece.logprobs)
        message.finish = piece.finish

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, without the last one, [DONE]."""
        for choice in self._call.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        async with contextlib.aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                for chunk in [KEEP_ALIVE] if piece is IDLE else self._chunks(piece):
                    yield chunk
        if self._with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._call)})

    def _chunks(self, piece: Piece) -> list[bytes]:
        """One for each part; the last has the logprobs. The finish reason has one of its own, as OpenAI's."""
        deltas = [_delta(part) for part in piece.parts]
        if piece.logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs: list[dict[str, Any]] = chat_logprobs(self._tokenizer, piece.logprobs)
        chunks = [self._chunk(piece.index, delta) for delta in deltas[:-1]]
        chunks += [self._chunk(piece.index, delta, logprobs) for delta in deltas[-1:]]
        if piece.finish is not None:
            chunks.append(self._chunk(piece.index, {}, finish=piece.finish))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish,
        }
        extra = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [choice], **extra})


def _delta(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return {"tool_calls": [_call_delta(part.call)]}
    return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.text}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.call, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call, "id": call.id, "type": "function", "function": function}
