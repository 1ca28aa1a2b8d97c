"""Anthropic's Messages API: shapes over the wire, and its official client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from server_harness import Harness, Reply, Script, Serve

from strata.interfaces.server.anthropic import schema as shapes

PATH = "/v1/messages"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> <think> </think> #}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"name": "add", "description": "Adds", "input_schema": SCHEMA}]
KEYS = {
    **{"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"},
    "signature_delta": "signature",
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}], **changes}


def events(reply: Reply) -> list[dict[str, Any]]:
    """The stream's events, whose names must be those of their data."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in reply.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message(server: Harness, **changes: Any) -> dict[str, Any]:
    """The whole message, which its stream must add up to."""
    reply = server.post(PATH, ask(**changes))
    assert reply.status == 200, reply.body
    shapes.MessageReply.model_validate(reply.json)
    whole: dict[str, Any] = reply.json
    streamed = events(server.post(PATH, ask(**changes, stream=True)))
    kinds = [event["type"] for event in streamed]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in streamed[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key = KEYS[delta["type"]]
            blocks[event["index"]][key.replace("partial_", "")] += delta[key]
    assert kinds.count("content_block_stop") == len(blocks)
    signed = [event["index"] for event in streamed if event.get("delta", {}).get("type") == "signature_delta"]
    assert signed == [place for place, block in enumerate(blocks) if block["type"] == "thinking"]
    for block, expected in zip(blocks, whole["content"], strict=True):
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        assert {**block, "id": 0} == {**expected, "id": 0}
    assert streamed[-2]["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    assert streamed[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


def test_text(server: Harness, speaking: Script) -> None:
    speaking.say("Hello.")
    got = message(server, system=[{"type": "text", "text": "Be brief."}])
    assert got["content"] == [{"type": "text", "text": "Hello."}] and got["stop_reason"] == "end_turn"
    assert got["model"] == "strata-demo" and got["id"].startswith("msg_")
    usage = got["usage"]
    assert usage["output_tokens"] > 1 and usage["input_tokens"] > 0


def test_why_it_stopped(server: Harness, speaking: Script) -> None:
    speaking.say("one two three")
    got = message(server, stop_sequences=["zwei", " th"])
    assert got["content"][0]["text"] == "one two"
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", " th")
    assert message(server, max_tokens=1)["stop_reason"] == "max_tokens"


def test_thinking_and_calls(server: Harness, speaking: Script) -> None:
    speaking.say(f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}")
    got = message(server, tools=TOOLS, max_tokens=200)
    kinds = [block["type"] for block in got["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and got["stop_reason"] == "tool_use"
    assert got["content"][0]["thinking"] == "Hm." and got["content"][1]["text"] == "I add."
    assert got["content"][2]["name"] == "add" and got["content"][2]["input"] == {"a": 2}
    ids = {block["id"] for block in got["content"][2:]}
    assert len(ids) == 2 and all(index.startswith("toolu_") for index in ids)
    one = message(
        server, tools=TOOLS, max_tokens=200, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block["type"] for block in one["content"]] == kinds[:3]
    speaking.say("Hm.\n</think>\n\nYes.")
    got = message(server, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block["type"] for block in got["content"]] == ["thinking", "text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_that_must_be_called(server: Harness, choice: dict[str, Any]) -> None:
    asked = {"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "temperature": 0}
    got = message(server, max_tokens=150, thinking={"type": "disabled"}, top_k=1, **asked)
    used = [block for block in got["content"] if block["type"] == "tool_use"]
    if got["stop_reason"] == "tool_use":  # else it was still thinking
        jsonschema.validate(used[0]["input"], SCHEMA)


def test_a_strict_tool_binds_a_call_that_the_model_makes_by_itself(server: Harness, speaking: Script) -> None:
    """Its arguments follow the schema, whatever it wanted to write; what is no call stays as it was."""
    speaking.say('So: {}.\n<tool_call>\n{"name": "add", "arguments": {"a": "two", "b": []}}\n</tool_call>')
    for strict in (False, True):
        got = message(server, tools=[{**TOOLS[0], "strict": strict}], max_tokens=250)
        text, used = got["content"][:2]
        assert text["text"] == "So: {}." and used["type"] == "tool_use"
        assert (used["input"] == {"a": "two", "b": []}) != strict
        if strict:
            jsonschema.validate(used["input"], SCHEMA)


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "2+3?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "easy", "signature": "x"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "5"}]},
            {"type": "text", "text": "And?"},
        ],
    },
]


def test_an_agents_turns_reach_the_model(server: Harness, speaking: Script) -> None:
    speaking.say("As expected.", to="<|im_start|>tool\n5<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>")
    speaking.say("No system.", to="never")
    got = message(server, messages=TURNS, tools=TOOLS, max_tokens=20)
    assert got["content"][0]["text"] == "As expected."
    again = server.post(PATH, ask(messages=TURNS, tools=TOOLS, max_tokens=20)).json["usage"]
    counted = server.post(f"{PATH}/count_tokens", {"model": "m", "messages": TURNS, "tools": TOOLS})
    assert counted.status == 200 and again["cache_read_input_tokens"] > 0
    assert counted.json["input_tokens"] == again["input_tokens"] + again["cache_read_input_tokens"]


WRONG: list[dict[str, Any]] = [
    {"max_tokens": None},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"messages": []},
    {"messages": [{"role": "system", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{}]}]}
        ]
    },
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
    {"messages": [{"role": "user", "content": "x y " * 20_000}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"tools": [{"name": "x"}]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool"}, "tools": TOOLS},
    {"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS},
    {"stop_sequences": [""]},
    {"temperature": "hot"},
    {"system": [{"type": "image"}]},
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(server: Harness, wrong: dict[str, Any], stream: bool) -> None:
    reply = server.post(PATH, ask(**wrong, stream=stream))
    assert reply.status == 400, reply.body
    shapes.MessagesErrorReply.model_validate(reply.json)
    assert reply.json["error"]["type"] == "invalid_request_error" and reply.json["error"]["message"]


def test_errors_have_its_shape_everywhere(server: Harness, serve: Serve) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        for reply, status, kind in (
            (server.post(path, b"{"), 400, "invalid_request_error"),
            (server.get(path), 405, "invalid_request_error"),
            (server.post(path, b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error"),
            (server.post(path, {}, headers={"host": "evil.example"}), 403, "permission_error"),
            (serve(keys=("k",)).post(path, ask()), 401, "authentication_error"),
        ):
            assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (status, "error", kind)
    assert serve(keys=("k",)).post(PATH, ask(), headers={"x-api-key": "k"}).status == 200


def test_a_request_that_fails_in_the_middle_of_its_stream(
    server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata.engine.sampler import Sampler

    sample = Sampler.sample

    def fail(self: Sampler, logits: Any, tokens: Any) -> int:
        if len(tokens) > 25:
            raise RuntimeError("broken")
        return sample(self, logits, tokens)

    monkeypatch.setattr(Sampler, "sample", fail)
    found = events(server.post(PATH, ask(stream=True)))
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"


def test_unknown_parameters_are_named(server: Harness) -> None:
    reply = server.post(PATH, ask(max_tokens=2, metadata={"user_id": "x"}, surprise=1))
    assert reply.headers["x-ignored-parameters"] == "surprise"


def test_the_official_client(server: Harness, speaking: Script) -> None:
    anthropic = pytest.importorskip("anthropic")
    httpx = pytest.importorskip("httpx2")
    speaking.say("Hello.")
    speaking.say(CALL, to="tools please")
    question = [{"role": "user", "content": "Hi"}]
    tools = [{"role": "user", "content": "tools please"}]

    async def talk() -> None:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = anthropic.AsyncAnthropic(
                base_url="http://localhost", api_key="k", http_client=http, max_retries=0
            )
            asked: Any = {"model": "m", "max_tokens": 80}
            whole = await client.messages.create(**asked, messages=question)
            assert whole.content[0].text == "Hello." and whole.stop_reason == "end_turn"
            async with client.messages.stream(**asked, messages=question) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "Hello." and final.usage.output_tokens == whole.usage.output_tokens
            called = await client.messages.create(**asked, messages=tools, tools=TOOLS)
            assert called.stop_reason == "tool_use" and called.content[0].input == {"a": 2}
            async with client.messages.stream(**asked, messages=tools, tools=TOOLS) as stream:
                assert (await stream.get_final_message()).content[0].input == {"a": 2}
            counted = await client.messages.count_tokens(model="m", messages=question)
            assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(model="m", max_tokens=5, messages=[])
            assert caught.value.body["error"]["type"] == "invalid_request_error"

    server.run(talk()).result(60)
