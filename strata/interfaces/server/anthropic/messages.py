"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from strata.interfaces.server.anthropic.convert import chat_body
from strata.interfaces.server.anthropic.errors import error_content
from strata.interfaces.server.anthropic.schema import CountBody, MessagesBody
from strata.interfaces.server.chat import begin_chat, visible_tools
from strata.interfaces.server.errors import ApiError
from strata.interfaces.server.generation import IDLE, Call
from strata.interfaces.server.output import Part
from strata.interfaces.server.service import Service
from strata.interfaces.server.text import chat_messages, chat_prompt, template_variables
from strata.interfaces.server.transport import streamed_answer, whole_answer
from strata.interfaces.strict_json import JsonError, read_json
from strata.interfaces.tokenizer import well_formed

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def message(service: Service, body: MessagesBody, http: HttpRequest) -> Response:
    """The whole way of a message. Raises ApiError before anything is sent where something is wrong."""
    call, unknown = await begin_chat(service, chat_body(body))
    unknown += [name for name in body.unknown if name not in unknown]
    writer = MessageWriter(service, call)
    if body.stream:
        return streamed_answer(service, http, call, unknown, writer.events(), end=b"", failed=_failed)
    return await whole_answer(service, http, call, unknown, writer.whole())


async def count_tokens(service: Service, body: CountBody) -> dict[str, int]:
    """How many tokens the prompt has."""
    chat = chat_body(body)
    tools = await visible_tools(service, chat)
    given = (service.model, chat_messages(chat), tools or None, template_variables(chat))
    _, ids = await service.in_thread("messages", chat_prompt, *given)
    return {"input_tokens": len(ids)}


class MessageWriter:
    """Turns a call's pieces into content blocks: a block ends where another kind of content begins."""

    def __init__(self, service: Service, call: Call) -> None:
        self._call = call
        self._head = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant"}
        self._head["model"] = service.name
        self._open: dict[str, Any] | None = None  # the block that grows
        self._blocks = 0

    async def whole(self) -> dict[str, Any]:
        """The message in one piece: what the stream's events add up to."""
        blocks: list[dict[str, Any]] = []
        arguments: list[str] = []
        async for piece in self._call.pieces():
            for event in [] if piece is IDLE else self._news(piece.parts):
                if event["type"] == "content_block_start":
                    blocks.append(dict(event["content_block"]))
                    arguments.append("")
                elif event["type"] == "content_block_delta":
                    arguments[-1] += event["delta"].get("partial_json", "")
                    _grow(blocks[-1], event["delta"])
        for block, text in zip(blocks, arguments, strict=True):
            if block["type"] == "tool_use":
                block["input"] = _object(text)
        return {**self._head, "content": blocks, **self._stop(), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message as events."""
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield _event({"type": "message_start", "message": {**self._head, **nothing}})
        async with contextlib.aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                for event in [{"type": "ping"}] if piece is IDLE else self._news(piece.parts):
                    yield _event(event)
        for event in self._close():
            yield _event(event)
        yield _event({"type": "message_delta", "delta": self._stop(), "usage": self._usage()})
        yield _event({"type": "message_stop"})

    def _news(self, parts: tuple[Part, ...]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if part.call is not None:
                if part.call.name is not None:
                    names = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.call.name, "input": {}}
                    events += self._begin({"type": "tool_use", **names})
                if part.call.arguments:
                    events.append(self._delta("input_json_delta", "partial_json", part.call.arguments))
            elif part.reasoning:
                events += self._in_block({"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._delta("thinking_delta", "thinking", part.reasoning))
            elif part.text:
                events += self._in_block({"type": "text", "text": ""})
                events.append(self._delta("text_delta", "text", part.text))
        return events

    def _in_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        same = self._open is not None and self._open["type"] == block["type"]
        return [] if same else self._begin(block)

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._open = block
        self._blocks += 1
        return [*events, {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        signed = self._open["type"] == "thinking"  # clients wait for it at the end of such a block
        self._open = None
        stop = {"type": "content_block_stop", "index": self._blocks - 1}
        return [self._delta("signature_delta", "signature", ""), stop] if signed else [stop]

    def _delta(self, kind: str, key: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, key: text}
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        choice = self._call.choices[0]
        if choice.stop_text is not None and choice.finish == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
        return {"stop_reason": _REASONS.get(choice.finish or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        shared = self._call.shared_tokens
        return {
            "input_tokens": self._call.prompt_tokens - shared,
            "output_tokens": self._call.completion_tokens,
            "cache_read_input_tokens": shared,
            "cache_creation_input_tokens": 0,
        }


def _grow(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key in ("text", "thinking"):
        if key in delta:
            block[key] += delta[key]


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object. What a model wrote may be none, or cut off: then there are none."""
    try:
        value = read_json(text or "{}", strict=False)
        value = read_json(well_formed(json.dumps(value, ensure_ascii=False)))  # half surrogate pairs
    except JsonError:
        return {}
    return value if isinstance(value, dict) else {}


def _failed(error: ApiError) -> bytes:
    return _event(error_content(error))


def _event(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()
