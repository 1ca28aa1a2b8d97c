"""Grammars of whole answers: in every family what they allow is what its reader reads, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_answers import written
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import marked_tokenizer

from strata.errors import RequestError
from strata.interfaces.grammar.compiler import GrammarCompiler, LlguidanceConstraint
from strata.interfaces.grammar.source import Grammar
from strata.interfaces.server.formats.answer_grammar import Calls, answer_source, free_source
from strata.interfaces.server.formats.choose import AnswerFormat

PARAMETERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -9, "maximum": 99},
        "word": {"type": "string", "maxLength": 6},
        "unit": {"type": "string", "enum": ["C", "F <b>"]},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["count", "unit"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
FUNCTIONS = [{"name": "measure", "parameters": PARAMETERS}, {"name": "stop"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
TEMPLATES = {
    name: answer["template"]
    for name, answer in json.loads((Path(__file__).parent / "model_answers.json").read_text()).items()
    if "," not in name  # variants of the same family
} | {"fenced": "<\uff5ctool\u2581sep\uff5c>```json", "unknown": "nothing", "unknown, thinks": "</think>"}


@pytest.fixture(scope="module", params=[*TEMPLATES])
def family(request: Any) -> AnswerFormat:
    return AnswerFormat(TEMPLATES[request.param])


@pytest.fixture(scope="module", params=["markers are tokens", "markers are text"])
def compiler(request: Any, family: AnswerFormat) -> GrammarCompiler:
    if request.param == "markers are text" and family.harmony:
        pytest.skip("gpt-oss ends its calls with a token that its tokenizer has")
    markers = family.markers if request.param == "markers are tokens" else ()
    return GrammarCompiler(marked_tokenizer(markers))


def constraint(
    compiler: GrammarCompiler,
    form: AnswerFormat,
    prompt: str = "",
    content: Grammar | None = None,
    calls: Calls | None = None,
) -> LlguidanceConstraint:
    return compiler.compile(answer_source(form, compiler.rules(), prompt, content, calls))


def answer(compiler: GrammarCompiler, form: AnswerFormat, following: LlguidanceConstraint, seed: int) -> str:
    """With the tokens that the reader must see."""
    ends = ("\n</parameter>", "</parameter>", "</arg_value>")
    return written(compiler._tokenizer, following, seed, (*form.markers, *ends))


def read(form: AnswerFormat, prompt: str, text: str, must_call: bool) -> tuple[str, list[tuple[str, Any]]]:
    parser = form.parser(prompt, TOOLS, must_call=must_call)
    calls: list[list[str]] = []
    content = ""
    for part in [*parser.add(text), *parser.finish()]:
        content += part.text
        if part.call is not None and part.call.name is not None:
            calls.append([part.call.name, ""])
        if part.call is not None:
            calls[-1][1] += part.call.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        assert name in ("measure", "stop")
        jsonschema.validate(arguments, PARAMETERS if name == "measure" else {"maxProperties": 0})


PROMPTS = st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), prompt=PROMPTS, several=st.booleans())
def test_a_call_that_must_be_is_one(
    family: AnswerFormat, compiler: GrammarCompiler, seed: int, prompt: str, several: bool
) -> None:
    following = constraint(compiler, family, prompt, calls=Calls(FUNCTIONS, several))
    content, calls = read(family, prompt, answer(compiler, family, following, seed), must_call=True)
    assert content == "" and (len(calls) == 1 or (several and calls))
    check(calls)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), prompt=PROMPTS)
def test_content_follows_its_schema_or_a_tool_is_called(
    family: AnswerFormat, compiler: GrammarCompiler, seed: int, prompt: str
) -> None:
    schema = {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 3}
    following = constraint(compiler, family, prompt, Grammar(schema=schema), Calls(FUNCTIONS, True))
    content, calls = read(family, prompt, answer(compiler, family, following, seed), must_call=False)
    if not calls:
        # Of an unknown format nothing is read as a call; what the grammar allowed is then in the content.
        value = json.loads(content)
        if not (family.name is None and isinstance(value, dict)):
            jsonschema.validate(value, schema)
    check(calls)


def test_reasoning_is_free_and_the_answer_is_not() -> None:
    form = AnswerFormat("<think> </think>")
    compiler = GrammarCompiler(marked_tokenizer(form.markers))
    encode = compiler._tokenizer.encode
    stop = min(compiler._tokenizer.stop_ids)
    thought = "<think>\nWell: {not json} \u00e9\n</think>\n\n"
    for prompt, begin in (("", thought), ("", ""), ("<think>", thought[7:]), ("</think>\n\n", "")):
        following = constraint(compiler, form, prompt, Grammar(schema={"type": "boolean"}))
        ids = encode(begin, special=True)
        assert following.legal([], ids) == len(ids)
        assert not following.legal(ids[: len(ids) // 2], [stop])  # not before the answer
        assert not following.legal(ids, encode("yes"))
        assert following.legal(ids, [*encode("true"), stop]) == 5
    closed = constraint(compiler, form, "</think>\n\n", Grammar(schema={"type": "boolean"}))
    assert not closed.legal([], encode("<think>", special=True))


def test_gpt_oss_may_think_twice_before_it_answers() -> None:
    form = AnswerFormat("<|channel|>")
    compiler = GrammarCompiler(marked_tokenizer(form.markers))
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    following = constraint(compiler, form, "", Grammar(schema={"type": "integer"}), Calls(FUNCTIONS, False))
    for text in (
        thought * 2 + "<|channel|>final<|message|>12",
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}",
    ):
        ids = compiler._tokenizer.encode(text, special=True)
        assert following.legal([], ids) == len(ids)
    wrong = compiler._tokenizer.encode("<|channel|>final<|message|>no", special=True)
    assert following.legal([], wrong) == len(wrong) - 2


def free(compiler: GrammarCompiler, form: AnswerFormat, prompt: str = "") -> LlguidanceConstraint:
    if form.name is None:
        pytest.skip("its calls are not read, so nobody sees its tools")
    return compiler.compile(free_source(form, compiler.rules(), prompt, Calls(FUNCTIONS, several=True)))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), prompt=PROMPTS)
def test_whatever_a_model_wants_its_calls_are_whole(
    family: AnswerFormat, compiler: GrammarCompiler, seed: int, prompt: str
) -> None:
    text = answer(compiler, family, free(compiler, family, prompt), seed)
    content, calls = read(family, prompt, text, must_call=False)
    check(calls)
    assert family.calls is None or family.calls.markers.begin not in content


def test_all_else_is_free(family: AnswerFormat, compiler: GrammarCompiler) -> None:
    following, encode = free(compiler, family), compiler._tokenizer.encode
    stop = min(compiler._tokenizer.stop_ids)
    begin = "<|channel|>final<|message|>" if family.harmony else ""
    for text in ("", "Well, {no json} <tool \u00e9<thi\n", "nothing </call> here"):
        ids = encode(begin + text, special=True)
        assert following.legal([], [*ids, stop]) == len(ids) + 1
    if family.calls is not None:
        broken = encode(f"I call. {family.calls.markers.begin}nothing", special=True)
        assert following.legal([], broken) < len(broken)
    if family.thinks and family.calls is not None and not compiler.rules().is_token("<think>"):
        thought = encode(f"<think>{family.calls.markers.begin}no</think>So.", special=True)
        assert following.legal([], [*thought, stop]) == len(thought) + 1


@pytest.mark.parametrize("required", [5, "count", [["count"]], [None]])
def test_required_that_is_no_list_of_names_is_refused(
    family: AnswerFormat, compiler: GrammarCompiler, required: object
) -> None:
    functions = [{"name": "measure", "parameters": {**PARAMETERS, "required": required}}]
    with pytest.raises(RequestError):
        constraint(compiler, family, calls=Calls(functions, several=False))
