"""Answers under grammars over HTTP: every greedy answer of a model that knows nothing is still valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from server_harness import CHAT, TEXT, Harness, Serve, hello

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "boolean": {"type": "boolean"},
    "number": {"type": "number", "minimum": -1.5, "maximum": 1.5, "multipleOf": 0.25},
    "union": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 10, "maximum": 20}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    "escapes": {"enum": ['a "b"', "c\\d", "e\nf", "\u00e9\U0001f600"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "greet", "parameters": PERSON}},
    {"type": "function", "function": {"name": "stop"}},
]


def json_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True, **more}}


def content(server: Harness, **changes: Any) -> str:
    """The whole answer, which ended by itself; its stream must give the same."""
    body = hello(**{"max_tokens": 200, **changes})
    reply = server.post(CHAT, body)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    events = server.post(CHAT, {**body, "stream": True}).events
    assert (
        "".join(e["choices"][0]["delta"].get("content", "") for e in events) == choice["message"]["content"]
    )
    return str(choice["message"]["content"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_greedy_answers_are_valid(tiny: Harness, name: str) -> None:
    """logit_bias steers the recursive schema to its end: greedy text of a random model may nest for ever."""
    schema = SCHEMAS[name]
    bias = {str(tiny.thread.model.tokenizer.encode("n")[0]): 100} if name == "recursive" else {}  # type: ignore[union-attr]
    text = content(tiny, response_format=json_schema(schema), logit_bias=bias)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(text), schema, format_checker=checker)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_answers_are_valid(tiny: Harness, seed: int) -> None:
    sampling = {
        "temperature": 1.5,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "repeat_penalty": 1.5,
    }
    text = content(tiny, response_format=json_schema(PERSON), ignore_eos=True, **sampling)
    jsonschema.validate(json.loads(text), PERSON)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "response_format": ({"response_format": json_schema(PERSON)}, PERSON),
    "response_format, not strict": ({"response_format": json_schema(PERSON, strict=False)}, PERSON),
    "response_format, llama.cpp": ({"response_format": {"type": "json_object", "schema": PERSON}}, PERSON),
    "json_schema, llama.cpp": ({"json_schema": PERSON}, PERSON),
    "guided_json": ({"guided_json": PERSON}, PERSON),
    "guided_json as text": ({"guided_json": json.dumps(PERSON)}, PERSON),
    "structured_outputs.json": ({"structured_outputs": {"json": PERSON}}, PERSON),
    "guided_choice": ({"guided_choice": ['"one"', '"two"']}, {"enum": ["one", "two"]}),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["1", "2"]}}, {"enum": [1, 2]}),
    "guided_regex": ({"guided_regex": "[1-9][0-9]{2}"}, {"type": "integer", "minimum": 100, "maximum": 999}),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "[1-9]"}}, {"minimum": 1}),
    "guided_grammar": ({"guided_grammar": 'start: "[" /[0-9]/ "]"'}, {"type": "array", "maxItems": 1}),
    "grammar": ({"grammar": 'root ::= "[" [0-9] "]"'}, {"type": "array", "maxItems": 1}),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": 'root ::= "null"'}}, {"type": "null"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_ways_that_clients_ask(tiny: Harness, name: str) -> None:
    asked, schema = SHAPES[name]
    jsonschema.validate(json.loads(content(tiny, **asked)), schema)
    reply = tiny.post(TEXT, {"prompt": "Hi", "max_tokens": 200, **asked})
    assert "x-ignored-parameters" not in reply.headers and reply.json["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(reply.json["choices"][0]["text"]), schema)


def test_any_object(tiny: Harness) -> None:
    """Which a random model never ends: what it wrote so far can be the beginning of one."""
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        choice = tiny.post(CHAT, hello(max_tokens=40, **asked)).json["choices"][0]
        assert choice["message"]["content"].startswith("{")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": json_schema({"type": "mystery"})}, "response_format"),
    ({"response_format": json_schema({"not": {"type": "string"}})}, "response_format"),
    ({"response_format": json_schema({"enum": []})}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": json_schema({"enum": ["x" * 300_000]})}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a(?=b)"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"grammar": "????"}, "grammar"),
    ({"grammar": "x" * 70_000}, "grammar"),
    ({"grammar": 'root ::= root "a"'}, "grammar"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("asked", "param"), WRONG)
def test_what_cannot_be_followed_is_refused(
    tiny: Harness, path: str, asked: dict[str, Any], param: str
) -> None:
    body = hello(**asked) if path == CHAT else {"prompt": "x", "max_tokens": 2, **asked}
    reply = tiny.post(path, body)
    assert reply.status == 400 and len(reply.error["message"]) < 2000
    assert reply.error["param"] == param


def call(server: Harness, **changes: Any) -> list[tuple[str, Any]]:
    body = hello(max_tokens=230, tools=TOOLS, **changes)
    reply = server.post(CHAT, body)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    streamed: dict[int, list[str]] = {}
    for event in server.post(CHAT, {**body, "stream": True}).events:
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            streamed.setdefault(delta["index"], []).append(delta["function"].get("name", ""))
            streamed[delta["index"]].append(delta["function"].get("arguments", ""))
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [call["name"] + call["arguments"] for call in calls] == ["".join(s) for s in streamed.values()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("parallel", [None, False])
def test_a_tool_that_must_be_called_is_called(tiny: Harness, parallel: bool | None) -> None:
    """Also where the template has no format for calls: they are JSON then."""
    [(name, arguments)] = call(tiny, tool_choice="required", parallel_tool_calls=parallel)
    jsonschema.validate(arguments, PERSON if name == "greet" else {"maxProperties": 0})
    for name, schema in (("greet", PERSON), ("stop", {"maxProperties": 0})):
        [(called, arguments)] = call(tiny, tool_choice={"type": "function", "function": {"name": name}})
        assert called == name
        jsonschema.validate(arguments, schema)


def test_tools_that_must_be_called_and_cannot(tiny: Harness) -> None:
    for body, param in (
        (hello(tool_choice="required"), "tool_choice"),
        (hello(tool_choice="required", tools=[]), "tool_choice"),
        (hello(tool_choice={"type": "function", "function": {"name": "x"}}, tools=TOOLS), "tool_choice"),
        (
            hello(
                tool_choice="required",
                tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            ),
            "tools",
        ),
    ):
        reply = tiny.post(CHAT, body)
        assert reply.status == 400 and reply.error["param"] == param


def test_each_choice_has_its_own_state(tiny: Harness) -> None:
    reply = tiny.post(
        CHAT, hello(n=3, temperature=1.0, seed=1, max_tokens=200, response_format=json_schema(PERSON))
    )
    texts = [choice["message"]["content"] for choice in reply.json["choices"]]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_batch_mates_do_not_notice(tiny: Harness) -> None:
    """Free and constrained answers together are what each is alone."""
    bodies = [
        hello(max_tokens=60),
        hello(max_tokens=200, response_format=json_schema(PERSON)),
        hello(max_tokens=60, guided_regex="[a-z]{50}"),
    ]
    alone = [tiny.post(CHAT, body).json["choices"] for body in bodies]
    running = [tiny.begin("POST", CHAT, body) for body in bodies * 2]
    assert [reply.result(30).json["choices"] for reply in running] == alone * 2


def test_clients_that_leave_leave_nothing_behind(tiny: Harness) -> None:
    body = hello(stream=True, max_tokens=200, guided_regex="[a-z]{190}")
    for pieces in (0, 1, 5):
        tiny.begin("POST", CHAT, body, leave_after=pieces).result(20)
        tiny.idle()
    assert len(content(tiny, guided_regex="[a-z]{190}")) == 190


def test_a_grammar_that_becomes_too_costly_fails_its_own_request(
    tiny: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata.interfaces.grammar.compiler import LlguidanceConstraint

    allowed = LlguidanceConstraint.allowed

    def worn(self: LlguidanceConstraint, answer: list[int]) -> Any:
        return allowed(self, answer if len(answer) < 3 else [*answer[:-1], 0])

    other = tiny.begin("POST", CHAT, hello(max_tokens=20))
    monkeypatch.setattr(LlguidanceConstraint, "allowed", worn)
    assert tiny.post(CHAT, hello(max_tokens=20, guided_regex="[a-z]{9}")).status == 400
    monkeypatch.undo()
    assert other.result(20).status == 200 and content(tiny, guided_regex="[a-z]{9}")


def test_drafts_change_no_answer(serve: Serve) -> None:
    """Rows that verify a draft are positions like all others; the pattern makes n-grams repeat."""
    bodies = [
        hello(max_tokens=120, guided_regex="(abcabcx?){10,20}"),
        hello(max_tokens=120, temperature=1.0, seed=3, guided_regex="([ab]{3},){20}"),
    ]
    answers = {}
    for use in ("off", "ngram"):
        server = serve(model={"speculative_use": use, "speculative_costs": "false"})
        answers[use] = [server.post(CHAT, body).json["choices"] for body in bodies]
        drafts = server.engine.speculator.figures.accepted if server.engine.speculator is not None else 0
        assert (drafts > 0) == (use == "ngram")
    assert answers["off"] == answers["ngram"]
