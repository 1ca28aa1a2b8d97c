"""Conversations in OpenAI's shape, made into what chat templates expect.

The API allows `content: null` beside tool calls, arguments as a JSON string, content in parts, an empty list
of tool calls; most templates were written for none of it. Everything here returns new values.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from strata.errors import RequestError

Message = dict[str, Any]


class Absent(Enum):
    """`ABSENT` stands for a key that is left out."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class CallStyle:
    """How a template wants tool calls. content: what stands for no content, one of None, "" and ABSENT;
    mapping: arguments as an object, not as JSON text; short_ids: call ids of nine letters (Mistral).
    """

    content: str | Absent | None = ""
    mapping: bool = True
    short_ids: bool = False


def normalised(messages: Any, *, knows_developer: bool) -> list[Message]:
    """Checked copies: nulls and empty lists dropped, arguments parsed, parts merged, roles known.

    knows_developer: whether the template has a developer role of its own; it becomes system where not.
    Raises RequestError with the index of the message at fault.
    """
    if not isinstance(messages, (list, tuple)):
        raise RequestError("messages is not a list")
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] is not an object with a role",
                remedy='e.g. {"role": "user", "content": "Hi"}',
            )
        result.append(_normalised(message, f"messages[{index}]", knows_developer))
    return result


def _normalised(message: Mapping[str, Any], where: str, knows_developer: bool) -> Message:
    clean: Message = {
        key: copy.deepcopy(value)
        for key, value in message.items()
        if key == "content" or (value is not None and not (key == "tool_calls" and value == []))
    }
    if clean["role"] == "developer" and not knows_developer:
        clean["role"] = "system"
    clean["content"] = _text(clean.get("content"), f"{where}.content")
    if clean["content"] is None and "tool_calls" not in clean:
        clean["content"] = ""
    if "reasoning" in clean:
        clean.setdefault("reasoning_content", clean["reasoning"])
    if "tool_calls" in clean:
        clean["tool_calls"] = _calls(clean["tool_calls"], f"{where}.tool_calls")
    return clean


def _text(content: Any, where: str) -> str | None:
    """Content as one string; text parts follow each other without a separator, as in OpenAI's API."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is a {type(content).__name__}, neither a string nor a list of parts")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise RequestError(
            f"{where}: parts of type {kind!r} are not supported", remedy="send text parts only"
        )
    return text


def _calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{where} is not a list of objects")
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict):
            function["arguments"] = _parsed(function.get("arguments"))
    return calls


def _parsed(arguments: Any) -> Any:
    """Arguments as a mapping; text that is no JSON object stays as the model wrote it."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments


def in_style(messages: list[Message], style: CallStyle) -> list[Message]:
    """The messages with their tool calls as a template wants them."""
    return [_message_in_style(message, style) for message in messages]


def _message_in_style(message: Message, style: CallStyle) -> Message:
    message = copy.deepcopy(message)
    if style.short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" not in message:
        return message
    if not message["content"]:
        message["content"] = style.content
    if message["content"] is ABSENT:
        del message["content"]
    for call in message["tool_calls"]:
        if style.short_ids and "id" in call:
            call["id"] = _short_id(call["id"])
        function = call.get("function", call)
        if not style.mapping and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def _short_id(value: Any) -> str:
    text = str(value)
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def in_parts(messages: list[Message]) -> list[Message]:
    """For templates that only read content as a list of parts."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


def system_merged(messages: list[Message]) -> list[Message]:
    """For templates without a system role: its text goes before the first user message."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"])
    rest = [dict(m) for m in messages if m["role"] != "system"]
    first = next((m for m in rest if m["role"] == "user"), None)
    if first is not None and system:
        first["content"] = f"{system}\n\n{first['content']}"
    return rest


def tools_described(tools: Any) -> Any:
    """Tools in which every parameter has the description that OpenAI's schema leaves optional."""
    if isinstance(tools, dict):
        described = {key: tools_described(value) for key, value in tools.items()}
        for parameter in described.get("properties", {}).values():
            if isinstance(parameter, dict):
                parameter.setdefault("description", "")
        return described
    return [tools_described(tool) for tool in tools] if isinstance(tools, list) else tools
