"""What a call looks like in each family, as terms of a grammar: the counterpart of the readers beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import RequestError
from strata.interfaces.grammar.source import Grammar, Rules, one_of, quoted
from strata.interfaces.server.formats.named_call import DEEPSEEK_SEPARATOR, KIMI_SEPARATOR

CallTerms = Callable[[Rules, Mapping[str, Any], str], str]
"""Terms of one call, without the markers around it: of the function, in a template with that source."""

_LONGEST = 10_000
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments(rules: Rules, function: Mapping[str, Any]) -> str:
    """A JSON object for the function's schema. Without `strict` it holds as far as grammars go.

    Raises RequestError for a schema of anything else.
    """
    schema = {"type": "object", **(function.get("parameters") or _NOTHING)}
    if schema["type"] != "object":
        raise RequestError(f"the parameters of the function {function['name']!r} are no JSON object")
    return rules.grammar(Grammar(schema=schema, lenient=not function.get("strict")))


def bare_terms(rules: Rules, function: Mapping[str, Any], source: str = "") -> str:
    """{"name": "add", "arguments": {...}}"""
    begin = f'{{"name": {quoted(function["name"])}, "arguments": '
    return f"{quoted(begin)} {arguments(rules, function)} {quoted('}')}"


def hermes_terms(rules: Rules, function: Mapping[str, Any], source: str) -> str:
    """The same in a line of its own."""
    newline = quoted("\n")
    return f"{newline} {bare_terms(rules, function)} {newline}"


def deepseek_terms(rules: Rules, function: Mapping[str, Any], source: str) -> str:
    """`add<sep>{...}`; V3 and R1 write `function<sep>add` and a fence around the arguments."""
    name, separator = function["name"], rules.marker(DEEPSEEK_SEPARATOR)
    if "```json" not in source:
        return f"{quoted(name)} {separator} {arguments(rules, function)}"
    begin, end = quoted(f"{name}\n```json\n"), quoted("\n```")
    return f"{quoted('function')} {separator} {begin} {arguments(rules, function)} {end}"


def kimi_terms(rules: Rules, function: Mapping[str, Any], source: str) -> str:
    """`functions.add:0<begin of arguments>{...}`."""
    name = quoted(f"functions.{function['name']}:")
    return f"{name} /[0-9]{{1,3}}/ {rules.marker(KIMI_SEPARATOR)} {arguments(rules, function)}"


def harmony_terms(rules: Rules, function: Mapping[str, Any], source: str = "") -> str:
    """From the channel on; the marker that ends the call is a stop token."""
    header = quoted(f"commentary to=functions.{function['name']} ")
    marks = [rules.marker(text) for text in ("<|channel|>", "<|constrain|>", "<|message|>")]
    return f"{marks[0]} {header} {marks[1]} {quoted('json')} {marks[2]} {arguments(rules, function)}"


def _required(schema: Mapping[str, Any], function: str) -> frozenset[str]:
    names = schema.get("required") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"tools: `required` of function {function!r} is no list of names")
    return frozenset(names)


@dataclass(frozen=True)
class KeyedTexts:
    """What is written around names and values; `{}` stands for the name.

    end: behind a value, and what a text value cannot hold.
    """

    begin: str
    argument: str
    end: str
    after: str
    close: str

    def __call__(self, rules: Rules, function: Mapping[str, Any], source: str) -> str:
        """Every required argument and any of the others, in the schema's order."""
        schema: Mapping[str, Any] = function.get("parameters") or _NOTHING
        properties = schema.get("properties")
        required = _required(schema, function["name"])
        terms = [self._literal(rules, self.begin, function["name"])]
        for name, value in (properties if isinstance(properties, dict) else {}).items():
            argument = f"{self._literal(rules, self.argument, name)} {self._value(rules, schema, value)}"
            argument += f" {self._literal(rules, self.after)}" if self.after else ""
            terms.append(f"({argument})" + ("" if name in required else "?"))
        return " ".join([*terms, self._literal(rules, self.close)] if self.close else terms)

    def _literal(self, rules: Rules, text: str, name: str = "") -> str:
        """Markers stand alone between `|`, all else is text."""
        pieces = [piece.replace("{}", name) for piece in text.split("|")]
        return " ".join(rules.marker(piece) for piece in pieces if piece)

    def _value(self, rules: Rules, schema: Mapping[str, Any], value: Any) -> str:
        """Texts are bare; of what a schema says of them, choices and lengths are enforced."""
        value = value if isinstance(value, dict) else {}
        end = self._literal(rules, self.end)
        if value.get("type") != "string":
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            return f"{rules.grammar(Grammar(schema={**definitions, **value}, lenient=True))} {end}"
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if choices:
            return f"{one_of(quoted(str(choice)) for choice in choices)} {end}"
        return rules.until(self.end, _length(value, "minLength") or 0, _length(value, "maxLength"))


def _length(schema: Mapping[str, Any], key: str) -> int | None:
    """A length that a regular expression may count to; others are not enforced."""
    length = schema.get(key)
    return length if isinstance(length, int) and 0 <= length <= _LONGEST else None


GLM_TERMS = KeyedTexts("{}|\n", "<arg_key>|{}|</arg_key>|\n|<arg_value>", "</arg_value>", "\n", "")
CODER_TERMS = KeyedTexts("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>", "\n", "</function>\n")
MINIMAX_TERMS = KeyedTexts(
    '\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "\n", "</invoke>\n"
)
