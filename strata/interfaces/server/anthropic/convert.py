"""From Anthropic's bodies to a chat body: the rest of the server knows one shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from strata.interfaces.server.anthropic.schema import Block, CountBody, InputMessage, MessagesBody
from strata.interfaces.server.errors import bad_request, validation_error
from strata.interfaces.server.schema import ChatBody

_SAME = ("model", "temperature", "top_p", "top_k", "stream")


def chat_body(body: CountBody) -> ChatBody:
    """The same request as a chat. Raises ApiError (400) for content that is not text, and broken turns."""
    try:
        return ChatBody.model_validate(_chat(body))
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _chat(body: CountBody) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": [*_system(body), *_turns(body.messages)]}
    if body.tools:
        chat["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools]
    chat |= _tool_choice(body)
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        # The two names that published templates read.
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        chat["thinking_token_budget"] = body.thinking.budget_tokens if thinks else None
    if isinstance(body, MessagesBody):
        chat |= {name: getattr(body, name) for name in _SAME} | {"max_tokens": body.max_tokens}
        chat["stop"] = list(dict.fromkeys(body.stop_sequences)) if body.stop_sequences else None
    return chat


def _system(body: CountBody) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    text = body.system if isinstance(body.system, str) else _text(body.system, "system")
    return [{"role": "system", "content": text}] if text else []


def _turns(messages: Sequence[InputMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "user":
            yield from _user(message.content)
        else:
            yield _assistant(message.content)


def _user(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own; what stands between them stays in its place."""
    words: list[Block] = []
    for block in blocks:
        if block.type != "tool_result":
            words.append(block)
            continue
        if words:
            yield {"role": "user", "content": _text(words, "messages")}
            words = []
        if not block.tool_use_id:
            raise bad_request("messages: a tool_result without tool_use_id", "messages")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if words or not blocks:
        yield {"role": "user", "content": _text(words, "messages")}


def _result(block: Block) -> str:
    if block.content is None or isinstance(block.content, str):
        text = block.content or ""
    else:
        text = _text([Block.model_validate(part) for part in block.content], "messages")
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    rest = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    message["content"] = _text(rest, "messages") if rest or not calls else None
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def _call(block: Block) -> dict[str, Any]:
    if not block.name:
        raise bad_request("messages: a tool_use without name", "messages")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(blocks: Sequence[Block], param: str) -> str:
    for block in blocks:
        if block.type != "text" or block.text is None:
            raise bad_request(f"{param}: content of type {block.type[:64]!r} is not supported here", param)
    return "\n".join(block.text or "" for block in blocks)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(body: CountBody) -> dict[str, Any]:
    asked = body.tool_choice
    if asked is None:
        return {}
    parallel = {"parallel_tool_calls": False} if asked.disable_parallel_tool_use else {}
    if asked.type != "tool":
        return {"tool_choice": "required" if asked.type == "any" else asked.type, **parallel}
    if not asked.name:
        raise bad_request("tool_choice: type tool needs a name", "tool_choice")
    return {"tool_choice": {"type": "function", "function": {"name": asked.name}}, **parallel}
