"""Reasoning and tool calls as every family writes them, cut anywhere: pieces make the same answer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.output import Part

PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}, "list": {"type": "array"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("add", "say")
]
ARGUMENTS = {"a": 2, "text": '5 "x" </b> {é}', "list": [1, {"b": "}"}]}
HERMES = "<tool_call> </think> <think>"
# What models write to say "Hello." and call add(ARGUMENTS) and say(), and a piece of their templates.
ANSWERS = {
    name: (answer["template"], "\n".join(answer["answer"]))
    for name, answer in json.loads((Path(__file__).parent / "model_answers.json").read_text()).items()
}


def read(source: str, text: str, cuts: list[int], prompt: str = "", tools: Any = TOOLS) -> dict[str, Any]:
    """What the pieces of a cut text make together."""
    parser = AnswerFormat(source).parser(prompt, tools)
    parts: list[Part] = []
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(places):
        parts += parser.add(text[begin:end])
    parts += parser.finish()
    calls: list[list[Any]] = []
    for part in parts:
        assert sum(map(bool, (part.text, part.reasoning, part.call))) == 1
        if part.call is None:
            continue
        if part.call.name is not None:
            assert part.call.call == len(calls) and part.call.id
            calls.append([part.call.name, ""])
        calls[part.call.call][1] += part.call.arguments
    return {
        "text": "".join(part.text for part in parts),
        "reasoning": "".join(part.reasoning for part in parts),
        "calls": calls,
    }


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=40))
def test_calls(name: str, cuts: list[int]) -> None:
    source, text = ANSWERS[name]
    got = read(source, text, cuts)
    assert got["text"] == "Hello." and got["reasoning"] == ""
    assert [(call, json.loads(arguments)) for call, arguments in got["calls"]] == [
        ("add", ARGUMENTS),
        ("say", {}),
    ]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_character_by_character(name: str) -> None:
    source, text = ANSWERS[name]
    assert read(source, text, list(range(len(text)))) == read(source, text, [])


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 500), max_size=30))
def test_reasoning(cuts: list[int]) -> None:
    text = "<think>\nWell, < 3.\n\nSo <b>.\n</think>\n\nIt is <4>.\n"
    expected = {"text": "It is <4>.\n", "reasoning": "Well, < 3.\n\nSo <b>.", "calls": []}
    assert read(HERMES, text, cuts) == expected
    assert read(HERMES, text.removeprefix("<think>"), cuts, prompt="<|assistant|>\n<think>\n") == expected
    assert read(HERMES, "It is.", cuts, prompt="<think>\n\n</think>\n\n")["text"] == "It is."
    harmony = "<|channel|>analysis<|message|>Well.<|end|>"
    harmony += "<|start|>assistant<|channel|>final<|message|>It is <4>.<|return|>"
    assert read("<|channel|>", harmony, cuts) == {"text": "It is <4>.", "reasoning": "Well.", "calls": []}


def test_a_call_after_reasoning_leaves_no_white_space() -> None:
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
    assert read(HERMES, text, []) == {"text": "", "reasoning": "Hm.", "calls": [["say", "{}"]]}


def test_reasoning_that_never_ends() -> None:
    assert read(HERMES, "Hm, ", [2], prompt="<think>")["reasoning"] == "Hm, "


@settings(max_examples=50, deadline=None)
@given(
    body=st.text("{}\"':,name \\a1<>/\n", max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    ended=st.booleans(),
)
def test_what_is_no_call_stays_text(body: str, cuts: list[int], ended: bool) -> None:
    """Nothing the model wrote is lost, and nothing raises."""
    text = f"a<tool_call>{body}" + ("</tool_call>" if ended else "")
    got = read(HERMES, text, cuts)
    assert got["calls"] or got["text"] == text


@settings(max_examples=40, deadline=None)
@given(
    text=st.text("ab <>/think_tool_call\n é", max_size=60), cuts=st.lists(st.integers(0, 100), max_size=10)
)
def test_text_without_markers_comes_through(text: str, cuts: list[int]) -> None:
    if "<think>" not in text and "<tool_call>" not in text:
        assert read(HERMES, text, cuts)["text"] == text
    assert read("no hints", text, cuts, tools=None)["text"] == text


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "harmony"])
def test_without_tools_nothing_is_a_call(name: str) -> None:
    source, text = ANSWERS[name]
    assert read(source, text, [5, 50], tools=[]) == {"text": text, "reasoning": "", "calls": []}


def test_arguments_are_streamed() -> None:
    """Not held back until the call is complete."""
    parser = AnswerFormat(HERMES).parser("", TOOLS)
    parser.add('<tool_call>{"name": "say", "arguments": {"text": "abc')
    assert [part.call.arguments for part in parser.add("def") if part.call] == ["def"]


def test_published_templates_are_known(cases: Any) -> None:
    known = {
        "Qwen-Qwen3-0.6B": "hermes",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
        "Qwen3-Coder": "coder",
        "GLM-4.6": "glm",
        "MiniMax-M2": "minimax",
        "deepseek-ai-DeepSeek-V3.1": "deepseek",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
        "Kimi-K2-Instruct": "kimi",
        "openai-gpt-oss-120b": "harmony",
        "google-gemma-2-2b-it": None,
    }
    for name, expected in known.items():
        source = (cases / "chat_templates" / f"{name}.jinja").read_text()
        assert AnswerFormat(source).name == expected, name
