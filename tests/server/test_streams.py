"""Answers that a test wrote: stop texts (case-15), half characters, full contexts (case-21, case-31)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import CHAT, TEXT, Harness, Script, hello, load

from strata.interfaces.bundled import model_path
from strata.interfaces.server import replies


def completed(server: Harness, path: str, **changes: Any) -> tuple[str, str]:
    """Text and finish reason, which must be the same whole and streamed."""
    body = {"max_tokens": 200, **changes}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    whole = choice["message"]["content"] if path == CHAT else choice["text"]
    streamed, reason = "", None
    for event in server.post(path, {**body, "stream": True}).events:
        piece = event["choices"][0]
        streamed += piece["delta"].get("content", "") if path == CHAT else piece["text"]
        reason = piece["finish_reason"]
    assert (streamed, reason) == (whole, choice["finish_reason"])
    return whole, reason


ALPHABET = "A B C D E F G H I J K L M N O P Q R S"
STOPS: list[tuple[Any, str, str]] = [
    (["O P Q"], "A B C D E F G H I J K L M N ", "stop"),
    ("O P Q", "A B C D E F G H I J K L M N ", "stop"),
    (["O P X", "N O P!"], ALPHABET, "stop"),
    (["X", "B C", "C", "Y", "Z"], "A ", "stop"),
    (["B C D", "C"], "A B ", "stop"),
    (["A"], "", "stop"),
    (["S"], ALPHABET[:-1], "stop"),
    (["S T"], ALPHABET, "stop"),
    (None, ALPHABET, "stop"),
    ([], ALPHABET, "stop"),
    ([f"{i}!" for i in range(64)], ALPHABET, "stop"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("stop", "text", "reason"), STOPS)
def test_stop_texts(tiny: Harness, script: Script, path: str, stop: Any, text: str, reason: str) -> None:
    """Every character is a token here, so that every stop text goes over several."""
    script.say(ALPHABET)
    assert completed(tiny, path, stop=stop) == (text, reason)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stop", ["ß", "é", "世界", "界", "😀", "e\u0301"])
def test_stop_texts_of_more_than_a_byte(tiny: Harness, script: Script, path: str, stop: str) -> None:
    """Half a character is neither shown nor compared."""
    before = "Füè 世 "
    script.say(before + stop + " after")
    assert completed(tiny, path, stop=[stop]) == (before, "stop")
    script.say(before)
    assert completed(tiny, path, stop=[stop]) == (before, "stop")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.text("aabc é😀", max_size=24),
    stops=st.lists(st.text("abc é", min_size=1, max_size=4), max_size=3),
)
def test_any_answer_ends_before_its_first_stop_text(
    tiny: Harness, script: Script, answer: str, stops: list[str]
) -> None:
    script.say(answer)
    found = [answer.find(stop) + len(stop) for stop in stops if stop in answer]
    # The stop text that is complete first counts; of several that end there, the longest.
    end = min(found, default=None)
    longest = max((len(s) for s in stops if end is not None and answer[:end].endswith(s)), default=0)
    expected = answer if end is None else answer[: end - longest]
    assert completed(tiny, TEXT, stop=stops) == (expected, "stop")


def test_text_is_streamed_as_it_comes(tiny: Harness, script: Script) -> None:
    """Not held back to the end, and held-back text goes out as soon as it is no stop text."""
    script.say("one two three")
    script.delay = 0.02
    reply = tiny.post(CHAT, hello(stream=True, stop=["two!"], max_tokens=50))
    assert reply.times[-1] - reply.times[0] > 0.2
    pieces = [event["choices"][0]["delta"].get("content") for event in reply.events]
    assert "two " in pieces and pieces.count("o") == 1


def test_half_a_character_at_the_end(tiny: Harness, script: Script) -> None:
    """The first byte of two: U+FFFD, once, in the last piece."""
    script.say("é")
    assert completed(tiny, TEXT, max_tokens=1) == ("\ufffd", "length")


def test_control_tokens_of_the_model_are_not_shown(tiny: Harness, script: Script) -> None:
    script.say("a<|im_start|>b")
    assert completed(tiny, CHAT)[0] == "ab"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_context_is_the_end(tiny: Harness, script: Script, path: str) -> None:
    """case-31: context 256, a prompt of 200, 2,000 tokens asked for."""
    script.say("x" * 500)
    content = "y" * 200
    body = {"messages": [{"role": "user", "content": content}]} if path == CHAT else {"prompt": content}
    answer = tiny.post(path, {**body, "max_tokens": 2000, "ignore_eos": True}).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_around_the_context(tiny: Harness, stream: bool) -> None:
    """case-21: 255 of 256 leave room for one token; from 256 on both numbers are named, before any event."""
    reply = tiny.post(TEXT, {"prompt": "a" * 255, "stream": stream, "max_tokens": 9, "ignore_eos": True})
    assert reply.status == 200
    choice = reply.events[-1]["choices"][0] if stream else reply.json["choices"][0]
    assert choice["finish_reason"] == "length"
    for length in (256, 257, 5000, 1_000_000):
        chats = [
            [{"role": "user", "content": "a" * length}],
            [{"role": "user", "content": "a"}] * min(length, 5000),
        ]
        for body in ({"prompt": "a" * length}, *({"messages": messages} for messages in chats)):
            reply = tiny.post(TEXT if "prompt" in body else CHAT, {**body, "stream": stream})
            assert reply.status == 400 and reply.error["code"] == "context_length_exceeded", reply.body
            assert "256" in reply.error["message"] and reply.error["param"] in body


def test_a_prompt_of_ids_beyond_the_context(tiny: Harness) -> None:
    reply = tiny.post(TEXT, {"prompt": [[1] * 256]})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"


# Reasoning and tools, through a server whose template knows both

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> <think> </think> #}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}"
)
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(TEMPLATE)
    harness = Harness(lambda: load(tiny_store, chat_template=file, model_context=256), warm_up=False)
    yield harness
    harness.close()


def message(server: Harness, **changes: Any) -> tuple[dict[str, Any], str]:
    """The answer's message, which a stream's deltas must add up to."""
    body = hello(max_tokens=200, **changes)
    reply = server.post(CHAT, body)
    assert reply.status == 200, reply.body
    replies.ChatReply.model_validate(reply.json)
    whole = reply.json["choices"][0]
    together: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in server.post(CHAT, {**body, "stream": True}).events:
        replies.ChatChunk.model_validate(event)
        delta = event["choices"][0]["delta"]
        together["content"] += delta.get("content", "")
        together["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                together["tool_calls"].append({"id": "", "type": call["type"], "function": call["function"]})
            else:
                together["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                    "arguments"
                ]
        reason = event["choices"][0]["finish_reason"]
    assert reason == whole["finish_reason"]
    seen = whole["message"]
    calls = [{**call, "id": ""} for call in seen.get("tool_calls", [])]
    assert together["tool_calls"] == calls and together["content"] == (seen["content"] or "")
    assert together["reasoning_content"] == seen.get("reasoning_content", "")
    return seen, reason


def test_a_tool_is_called(server: Harness, speaking: Script) -> None:
    speaking.say("I add.\n" + CALL)
    answer, reason = message(server, tools=TOOLS)
    assert reason == "tool_calls" and answer["content"] == "I add."
    assert [call["function"] for call in answer["tool_calls"]] == [{"name": "add", "arguments": '{"a": 2}'}]
    speaking.say(CALL)
    assert message(server, tools=TOOLS)[0]["content"] is None


def test_one_call_at_a_time(server: Harness, speaking: Script) -> None:
    speaking.say(CALL + "\n" + CALL)
    assert len(message(server, tools=TOOLS)[0]["tool_calls"]) == 2
    answer, reason = message(server, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer["tool_calls"]) == 1 and reason == "tool_calls"


def test_tools_that_must_not_be_called(server: Harness, speaking: Script) -> None:
    """They are not even shown."""
    speaking.say(CALL)
    answer, reason = message(server, tools=TOOLS, tool_choice="none")
    assert answer["content"] == CALL and reason == "stop"
    counts = [
        server.post(CHAT, hello(tools=TOOLS, tool_choice=choice)).json["usage"]["prompt_tokens"]
        for choice in ("none", "auto")
    ]
    assert counts[0] == server.post(CHAT, hello()).json["usage"]["prompt_tokens"] < counts[1]


def test_a_call_that_the_limit_cuts_off(server: Harness, speaking: Script) -> None:
    speaking.say(CALL)
    reply = server.post(CHAT, hello(tools=TOOLS, max_tokens=50)).json["choices"][0]
    assert reply["finish_reason"] == "length"


def test_reasoning_is_apart(server: Harness, speaking: Script) -> None:
    speaking.say("<think>\nHm.\n</think>\n\nYes.")
    expected = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert message(server) == (expected, "stop")
    speaking.say("Hm.\n</think>\n\nYes.")
    assert message(server, chat_template_kwargs={"thinking": True}) == (expected, "stop")


def test_an_agents_next_turn(cases: Path, tmp_path: Path) -> None:
    """`content: null` beside a call with arguments as text, then the tool's result."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    server = Harness(lambda: load(model_path("demo"), chat_template=tmp_path / "t.jinja"), warm_up=False)
    case = json.loads((cases / "api" / "agent_turn_null_content.json").read_text())
    reply = server.post(CHAT, {**case["body"], "max_tokens": 8})
    server.close()
    assert "x-ignored-parameters" not in reply.headers
    assert reply.events[-1]["usage"]["completion_tokens"] > 0


def test_tools_that_a_template_does_not_show_are_named(tiny: Harness, cases: Path) -> None:
    reply = tiny.post(CHAT, hello(tools=TOOLS))
    assert reply.status == 200 and reply.headers["x-ignored-parameters"] == "tools"
    case = json.loads((cases / "api" / "agent_turn_null_content.json").read_text())
    assert tiny.post(CHAT, case["body"]).status == 200
