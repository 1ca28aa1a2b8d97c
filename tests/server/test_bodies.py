"""Bad bodies (case-19), empty prompts (case-11), parameters that nobody obeys: never a 5xx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server_harness import CHAT, TEXT, Harness, hello

from strata.interfaces.server.schema import UNSUPPORTED, WITHOUT_EFFECT


def refused(server: Harness, path: str, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
    """The error; the server must answer the next request."""
    reply = server.post(path, body, **options)
    assert reply.status == status, reply.body
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert server.post(CHAT, hello(max_tokens=1)).status == 200
    return error


def test_collected_bad_bodies(tiny: Harness, cases: Path) -> None:
    for case in json.loads((cases / "api" / "bad_bodies.json").read_text()):
        for path in (CHAT, TEXT):
            refused(tiny, path, case["raw"].encode())


BROKEN = {
    "bytes": b"\xff\xfe\xff",
    "half a body": b'{"messages": [{"role": "user", "content": "hi',
    "bytes in a string": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "deep": b"[" * 100_000,
    "deep object": b'{"messages":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "deep in place": b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep variables": b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":'
    + b"[" * 990
    + b"]" * 990
    + b'},"stop":""}',
    "nul": b'{"messages":[{"role":"user","content":"x"}],"stop":[]}\x00',
    "two values": b"{} {}",
}


NUMBERS = {
    "NaN": "NaN is no JSON number",
    "-Infinity": "-Infinity is no JSON number",
    "1e999": "1e999 is larger",
    "9" * 5000: "4300",
    "01": "character",
    "1.": "character",
    "+1": "character",
    "0x10": "character",
    "1_000": "character",
    "\u0661": "character",
}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:12])
@pytest.mark.parametrize(
    "place",
    [
        '"temperature": %s',
        '"response_format": {"type": "json_object", "schema": {"maximum": %s}}',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]',
        '"chat_template_kwargs": {"x": [%s]}',
        '"surprise": %s',
    ],
)
def test_numbers_that_are_none(tiny: Harness, number: str, place: str) -> None:
    """Wherever they stand, and with the cause; Python's reader would take some of them."""
    body = '{"messages": [{"role": "user", "content": "x"}], "prompt": "x", ' + place % number + "}"
    for path in (CHAT, TEXT):
        message = refused(tiny, path, body.encode())["message"]
        assert message.startswith("the body is not JSON: ") and NUMBERS[number] in message
        assert len(message) < 200


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_none(tiny: Harness) -> None:
    """RFC 8259: UTF-8, and nothing else."""
    text = json.dumps(hello())
    assert tiny.post(CHAT, text.encode("utf-8-sig")).status == 200
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        assert "not JSON" in refused(tiny, CHAT, text.encode(encoding))["message"]


def test_delete_is_a_character_like_others(tiny: Harness) -> None:
    """U+007F may stand in JSON, in a schema's texts and in a grammar's."""
    for asked in (
        {"response_format": {"type": "json_object", "schema": {"const": "a\x7fb"}}},
        {"guided_choice": ['"a\x7fb"']},
        {"guided_regex": '"a\x7fb"'},
    ):
        reply = tiny.post(CHAT, hello(max_tokens=30, **asked))
        assert reply.status == 200 and json.loads(reply.json["choices"][0]["message"]["content"]) == "a\x7fb"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_json(tiny: Harness, name: str) -> None:
    for path in (CHAT, TEXT):
        refused(tiny, path, BROKEN[name])


WRONG: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in ("ten", -1, 1e99, 1.5, True, "10", [1])),
    *(("temperature", value) for value in (3, -0.1, "hot", True)),
    *(("n", value) for value in (0, -1, 1000, 1.5, "2")),
    *(("top_p", value) for value in (2, -1)),
    *(("stop", value) for value in ("", [""], ["a", ""], 5, [1], ["x"] * 65, "y" * 5000)),
    *(("seed", value) for value in (1.5, "1", 1 << 63, 10**40)),
    *(("presence_penalty", value) for value in (2.1, -3, "x")),
    *(("frequency_penalty", value) for value in (2.1, -3)),
    *(("logit_bias", value) for value in ({"a": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, [1], {"99999": 1})),
    *(("stream", value) for value in ("yes", 1, [])),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "usage"),
    ("repeat_penalty", 0),
    ("top_k", -2),
    ("min_p", 1.5),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    *(("messages", value) for value in ("x", [], {}, None, ["x"], [{}], [{"role": "user", "content": 5}])),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": "f"}]}]),
    *(("logprobs", value) for value in (1, "true")),
    *(("top_logprobs", value) for value in (21, -1, 2)),  # 2: without logprobs
    ("max_completion_tokens", -5),
    ("response_format", {"type": "xml"}),
    ("tool_choice", "maybe"),
    ("tools", [{"type": "web_search"}]),
    ("modalities", ["text", "audio"]),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"not a name": 1}),
]
WRONG_TEXT: list[tuple[str, Any]] = [
    *(("prompt", value) for value in ("", [], [""], [[]], ["x", ""], [[1], []], None, 5, {}, [[1.5]], [-1])),
    ("prompt", [1, "x"]),
    ("prompt", [99999]),
    ("prompt", [1 << 40]),
    ("prompt", "\ud800"),
    *(("logprobs", value) for value in (21, -1, True)),
    ("best_of", 2),
    ("suffix", "end"),
]


@pytest.mark.parametrize(("name", "value"), WRONG + WRONG_CHAT)
def test_wrong_values_in_chats(tiny: Harness, name: str, value: Any) -> None:
    error = refused(tiny, CHAT, hello(**{name: value}))
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize(("name", "value"), WRONG + WRONG_TEXT)
def test_wrong_values_in_completions(tiny: Harness, name: str, value: Any) -> None:
    error = refused(tiny, TEXT, {"prompt": "x", "max_tokens": 1, name: value})
    assert error["param"] == name and name in error["message"]


def test_the_value_itself_is_not_repeated(tiny: Harness) -> None:
    error = refused(tiny, CHAT, hello(temperature="secret " * 1000))
    assert "secret" not in error["message"] and len(error["message"]) < 200


def test_an_empty_message_is_legal(tiny: Harness) -> None:
    for content in ("", None, []):
        assert tiny.post(CHAT, hello(messages=[{"role": "user", "content": content}])).status == 200


def test_the_last_of_two_equal_keys_counts(tiny: Harness) -> None:
    """As Python's json and most others read it."""
    body = b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2, "temperature": 0, "ignore_eos": true}'
    assert tiny.post(TEXT, body).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_content_types_are_refused(tiny: Harness, kind: str) -> None:
    refused(tiny, CHAT, hello(), 415, headers={"content-type": kind})


def test_a_charset_in_the_content_type_is_fine(tiny: Harness) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert tiny.post(CHAT, hello(), headers=headers).status == 200


def test_a_large_body_is_refused(tiny: Harness) -> None:
    """By the header that announces it, and by counting where the header lies or is missing."""
    limit = tiny.service.config.server.body
    for length in ("300000000", "9" * 5000):
        refused(tiny, CHAT, b"{}", 413, headers={"content-length": length})
    refused(tiny, CHAT, b" " * (limit + 1), 413)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_known_parameters_without_support_are_refused(tiny: Harness, name: str) -> None:
    error = refused(tiny, CHAT, hello(**{name: 0.5}))
    assert error["code"] == "unsupported_parameter" and error["param"] == name
    assert tiny.post(CHAT, hello(**{name: None})).status == 200
    assert tiny.post(CHAT, hello(**{name: False})).status == 200


def test_unknown_parameters_are_named_in_a_header(tiny: Harness) -> None:
    given = dict.fromkeys(WITHOUT_EFFECT, "x")
    # HTTP refuses headers that hold a line's end or that end in a space: the answer would be lost.
    odd = dict.fromkeys(("new\nline", "", " ", "a ", "\t", "é", "x" * 65), 1)
    reply = tiny.post(CHAT, hello(temprature=1, **given, other=[1], **odd, nothing=None))
    assert reply.status == 200 and reply.headers["x-ignored-parameters"] == "temprature, other"
    assert "x-ignored-parameters" not in tiny.post(CHAT, hello(**given)).headers


def test_wrong_paths_and_methods(tiny: Harness) -> None:
    assert tiny.get("/v1/nothing").status == 404 and tiny.get("/v1/nothing").error
    assert tiny.get(CHAT).status == 405 and tiny.get(CHAT).error
    assert tiny.request("DELETE", "/v1/models", b"").status == 405


def test_bodies_are_never_logged(tiny: Harness) -> None:
    secret = "pssst"
    tiny.post(CHAT, hello(messages=[{"role": "user", "content": secret}], user=secret, **{secret: 1}))
    tiny.post(CHAT, hello(temperature=secret))
    tiny.post(CHAT, secret.encode())
    assert tiny.log.lines and secret not in tiny.log.text
