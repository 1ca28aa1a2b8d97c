"""What a body says about the form of its answer, as a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strata.interfaces.grammar.compiler import free_grammar
from strata.interfaces.grammar.source import Grammar, choice, regex
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.errors import bad_request
from strata.interfaces.server.formats.answer_grammar import Calls, answer_source, free_source
from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.schema import ChatBody, ResponseFormat, Sampling, ToolChoice
from strata.interfaces.strict_json import JsonError, read_json

_OBJECT = {"type": "object"}


class Wanted(NamedTuple):
    """param: the field that asked for it."""

    grammar: Grammar
    param: str


def wanted_grammar(body: Sampling) -> Wanted | None:
    """What the content must be. Raises ApiError (400) where several grammars are given, or a broken one."""
    asked = {**_asked(body), **_asked_as_structured_outputs(body)}
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} exclude each other: send one of them", [*asked][1])
    return next((Wanted(grammar, param) for param, grammar in asked.items()), None)


def _asked(body: Sampling) -> dict[str, Grammar]:
    found: dict[str, Grammar | None] = {
        "response_format": _of_format(body.response_format),
        "json_schema": _of_schema(body.json_schema, "json_schema"),
        "guided_json": _of_schema(body.guided_json, "guided_json"),
        "guided_regex": None if body.guided_regex is None else regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else choice(body.guided_choice),
        "grammar": free_grammar(body.grammar) if body.grammar else None,
        "guided_grammar": free_grammar(body.guided_grammar) if body.guided_grammar else None,
    }
    return {param: grammar for param, grammar in found.items() if grammar is not None}


def _asked_as_structured_outputs(body: Sampling) -> dict[str, Grammar]:
    asked, name = body.structured_outputs, "structured_outputs"
    if asked is None:
        return {}
    if any((asked.model_extra or {}).get(key) for key in ("structural_tag", "whitespace_pattern")):
        raise bad_request(f"{name}: structural_tag and whitespace_pattern are not supported", name)
    found: dict[str, Grammar | None] = {
        f"{name}.json": _of_schema(asked.json_, name),
        f"{name}.regex": None if asked.regex is None else regex(asked.regex),
        f"{name}.choice": None if asked.choice is None else choice(asked.choice),
        f"{name}.grammar": free_grammar(asked.grammar) if asked.grammar else None,
        f"{name}.json_object": Grammar(schema=_OBJECT) if asked.json_object else None,
    }
    return {param: grammar for param, grammar in found.items() if grammar is not None}


def _of_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is not None:
        return Grammar(schema=asked.json_schema.schema_, lenient=asked.json_schema.strict is False)
    return Grammar(schema=_OBJECT if asked.schema_ is None else asked.schema_)


def _of_schema(schema: Mapping[str, Any] | str | None, param: str) -> Grammar | None:
    """vLLM's clients send the schema as text, too."""
    if isinstance(schema, str):
        try:
            schema = read_json(schema)
        except JsonError as error:
            raise bad_request(f"{param} is not JSON: {error}", param) from None
        if not isinstance(schema, dict):
            raise bad_request(f"{param} is no JSON object", param)
    return None if schema is None else Grammar(schema=schema)


def must_call(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)


def required_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools, one of which must be called. Raises ApiError where there are none, or none of that name."""
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise bad_request(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice")
    if not tools:
        raise bad_request("tool_choice is required, but there are no tools", "tool_choice")
    return tools


def chat_source(
    model: LoadedModel,
    form: AnswerFormat,
    body: ChatBody,
    prompt: str,
    tools: Sequence[Mapping[str, Any]],
    wanted: Wanted | None,
) -> str | None:
    """The grammar of a chat's answer; None: it is free. tools: those that may be called.

    With a grammar for the content a model may still call a tool instead, where it may call any. A `strict`
    tool binds all calls of an answer that is free otherwise.
    """
    forced, rules = must_call(body), model.grammars.rules()
    named = isinstance(body.tool_choice, ToolChoice)
    functions = [tool["function"] for tool in tools]
    several = not named and body.parallel_tool_calls is not False
    calls = Calls(functions, several) if functions else None
    if wanted is None and not forced:
        strict = any(function.get("strict") for function in functions)
        return free_source(form, rules, prompt, calls) if calls and strict else None
    content = None if forced or wanted is None else wanted.grammar
    return answer_source(form, rules, prompt, content, calls)
