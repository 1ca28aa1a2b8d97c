"""/v1/messages asked by those who mean no good, or know no better: 200 or 400 in its shape, and no traces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_harness import Harness, Script

from strata.interfaces.server.anthropic import schema as shapes

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> <arg_key> #}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ANYTHING = {"name": "note", "input_schema": {"type": "object"}}


def ask(*content: Any, **changes: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": [*content] if content else "Hi"}]
    return {"model": "m", "max_tokens": 4, "messages": turns, **changes}


def refused(server: Harness, body: Any, status: int = 400) -> str:
    """The message, of both endpoints; the next request is answered."""
    for path in (COUNT, PATH):
        reply = server.post(path, body)
        assert reply.status == status, reply.body
        shapes.MessagesErrorReply.model_validate(reply.json)
        assert "Traceback" not in reply.json["error"]["message"]
    assert server.post(PATH, ask(max_tokens=1)).status == 200
    return str(reply.json["error"]["message"])


def text(content: Any) -> dict[str, Any]:
    return {"type": "text", "text": content}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
DOCUMENT = {"type": "document", "source": {"type": "url", "url": "file:///etc/passwd"}}
USED = {"type": "tool_use", "id": "1", "name": "x", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_none", "content": "5"}

SHAPES: list[Any] = [
    {"messages": None},
    {"messages": "Hi"},
    {"messages": {"role": "user", "content": "x"}},
    {"messages": [None]},
    {"messages": [[]]},
    {"messages": ["Hi"]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
    {"messages": [{"role": "user", "content": [None]}]},
    {"messages": [{"role": "user", "content": ["x"]}]},
    {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
    {"messages": [{"role": "assistant", "content": [{**USED, "input": "{}"}]}]},
    {"messages": [{"role": "assistant", "content": [{**USED, "id": 1}]}]},
    {"messages": [{"role": "user", "content": [{**RESULT, "content": [text("x"), 5]}]}]},
    {"messages": [{"role": "user", "content": [{**RESULT, "content": [{**RESULT}]}]}]},
    {"messages": [{"role": "user", "content": [{**RESULT, "is_error": "yes"}]}]},
    {"system": 5},
    {"system": [None]},
    {"system": ["x"]},
    {"system": {"type": "text", "text": "x"}},
    {"tools": {}},
    {"tools": [None]},
    {"tools": [{"name": "", "input_schema": {}}]},
    {"tools": [{"name": "x" * 300, "input_schema": {}}]},
    {"tools": [{"name": "x", "input_schema": "object"}]},
    {"tools": [{"name": "x", "input_schema": {}, "strict": "yes"}]},
    {"tool_choice": "any"},
    {"tool_choice": {"type": "function"}},
    {"thinking": True},
    {"thinking": {"type": "maybe"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1e99}},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: json.dumps(shape)[:60])
def test_bad_shapes(server: Harness, shape: dict[str, Any]) -> None:
    assert next(iter(shape)) in refused(server, ask(**shape))


@pytest.mark.parametrize("role", ["system", "tool", "developer", "User", "", "king", None, 1, ["user"], {}])
def test_odd_roles(server: Harness, role: Any) -> None:
    assert "role" in refused(server, ask(messages=[{"role": role, "content": "x"}]))


@pytest.mark.parametrize("block", [IMAGE, DOCUMENT, {"type": "search_result"}, {"type": "\ud800"}])
def test_what_is_no_text(server: Harness, block: dict[str, Any]) -> None:
    """Named, wherever it stands; no address is ever opened."""
    for turns in (
        ask(text("What is this?"), block),
        ask({**RESULT, "content": [block]}),
        ask(system=[block]),
        ask(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]),
    ):
        assert "not supported" in refused(server, turns)


def test_results_without_a_call_and_calls_without_a_result(server: Harness) -> None:
    """An agent that shortened its history; the template decides what the model sees of it."""
    call = {"role": "assistant", "content": [USED]}
    for turns in (
        [{"role": "user", "content": [RESULT]}],
        [{"role": "user", "content": [RESULT, RESULT, {**RESULT, "tool_use_id": "other"}]}],
        [{"role": "user", "content": "x"}, call],
        [{"role": "user", "content": "x"}, call, call, {"role": "user", "content": "y"}],
        [call],
        [{"role": "user", "content": []}],
        [{"role": "assistant", "content": []}, {"role": "assistant", "content": ""}],
        [{"role": "user", "content": [{**RESULT, "content": None}]}],
        [{"role": "user", "content": [{**RESULT, "content": []}]}],
    ):
        assert server.post(PATH, ask(messages=turns)).status == 200
        assert server.post(COUNT, ask(messages=turns)).status == 200
    for lost in ("", None):
        assert "tool_use_id" in refused(server, ask({**RESULT, "tool_use_id": lost}))


def test_a_huge_system(server: Harness) -> None:
    """Both numbers, before any token; and the body's limit in its shape."""
    assert server.thread.model is not None
    context = server.thread.model.context
    for system in ("a b " * 100_000, [text("a b " * 50_000)] * 2):
        reply = server.post(PATH, ask(system=system, stream=True))
        assert reply.status == 400 and str(context) in reply.json["error"]["message"]
    assert server.post(PATH, ask(system=[text("")] * 5000)).status == 400
    limit = server.service.config.server.body
    reply = server.post(PATH, ask(system="x" * limit))
    assert reply.status == 413 and reply.json["error"]["type"] == "request_too_large"


def test_clients_that_leave(server: Harness, speaking: Script) -> None:
    """Before the first event, in the middle of a block or a call, before the end: nothing stays behind."""
    speaking.say("Well.<tool_call>note\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call> " * 20)
    for stream in (True, False):
        body = ask(max_tokens=400, tools=[ANYTHING], stream=stream)
        for pieces in (0, 1, 2, 5, 30):
            reply = server.begin("POST", PATH, body, leave_after=pieces).result(60)
            assert reply.status in (0, 200, 499)
            server.idle()
    assert server.post(PATH, ask()).status == 200


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e999", '"\\ud800"', '{"\\udfff": ["\\ud800"]}', "[" * 50]
)
def test_arguments_that_are_no_json_are_no_fault_of_the_server(
    server: Harness, speaking: Script, value: str
) -> None:
    """The model wrote them; whole, streamed and as a chat."""
    speaking.say(f"<tool_call>note\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>")
    body = ask(max_tokens=300, tools=[ANYTHING])
    reply = server.post(PATH, body)
    assert reply.status == 200, reply.body
    assert server.post(PATH, {**body, "stream": True}).body.endswith(b'{"type":"message_stop"}\n\n')
    tools = [{"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 300}
    reply = server.post("/v1/chat/completions", chat)
    assert reply.status == 200 and reply.body.decode()
    assert server.post("/v1/chat/completions", {**chat, "stream": True}).events


@pytest.mark.parametrize("name", ["\ud800", "\x00", "\x7f", "a\nb", "é" * 200])
def test_names_that_are_none_are_not_repeated_as_they_are(server: Harness, name: str) -> None:
    """In an error's words, in a header, as the name of a tool."""
    reply = server.post("/v1/chat/completions", {"messages": [], "logit_bias": {name: "x"}})
    assert reply.status == 400 and reply.body.decode()
    reply = server.post(PATH, ask(**{name: 1}))
    assert reply.status == (400 if name == "\ud800" else 200)
    reply = server.post(PATH, ask(tools=[{"name": name, "input_schema": {}}], tool_choice={"type": "any"}))
    assert reply.status in (200, 400) and reply.body.decode()
