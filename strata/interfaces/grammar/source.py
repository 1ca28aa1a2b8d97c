"""Grammars as llguidance reads them: Lark rules that refer to JSON schemas and to other grammars.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from strata.errors import RequestError

MAX_BYTES = 256 << 10
"""Of one grammar: an enumeration of 100,000 texts (1.5 MB) kept the library busy for 0.6 s."""
MAX_MULTIPLE = 100_000
"""Of all `multipleOf` together, without powers of ten. The library counts remainders: 100,003 takes 0.3 s,
1,000,003 up to 20 s, ten times as much more than 5 minutes, and its own limits do not stop it."""
_MULTIPLE_OF = re.compile(r'\\*"multipleOf\\*"\s*:\s*([0-9.eE+-]{1,400})')
"""In a schema, or in one that is written into Lark."""

_WHITE_SPACE = r"(\n[ \t]{0,40}| )?"
"""Between JSON tokens: a space, or a line break with its indentation. Without a bound a weak model fills its
answer with spaces."""


@dataclass(frozen=True)
class Grammar:
    """Either lark, which has a rule `start`, or a JSON schema.

    lenient: keywords of the schema that no grammar expresses are left out instead of refused.
    """

    lark: str | None = None
    schema: Mapping[str, Any] | None = None
    lenient: bool = False

    def named(self, name: str) -> dict[str, Any]:
        """As llguidance lists it under that name."""
        if self.schema is None:
            return {"name": name, "lark_grammar": self.lark}
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": self.lenient, "coerce_one_of": self.lenient}
        return {"name": name, "json_schema": {**self.schema, "x-guidance": options}}


class Rules:
    """Puts the rules of a whole answer together.

    token_id: the id of a control token, None for other texts: a marker is one token where the tokenizer has
    it, and else text.
    """

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def marker(self, text: str) -> str:
        """A term: the marker."""
        index = self._token_id(text)
        return quoted(text) if index is None else f"<[{index}]>"

    def is_token(self, text: str) -> bool:
        """Whether the tokenizer has a control token of that text."""
        return self._token_id(text) is not None

    def until(self, end: str, least: int = 0, most: int | None = None) -> str:
        """A term: text of so many characters, and the marker that ends it."""
        text = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        if self._token_id(end) is None:
            return self._rule(f"[suffix={quoted(end)}]: {text}")
        return f"{self._rule(f': {text}')} {self.marker(end)}"

    def free(self, without: Sequence[str]) -> str:
        """A terminal: any text, without control tokens and without these other markers."""
        name = f"FREE{len(self._rules)}"
        plain = [_in_regex(text) for text in without if self._token_id(text) is None]
        unless = f" & ~/(?s:.*)({'|'.join(plain)})(?s:.*)/" if plain else ""
        self._rules.append(f"{name}: /(?s:.*)/{unless}")
        return name

    def after(self, free: str, marker: str) -> str:
        """A term: text of that terminal, which is `without` the marker, up to the marker and with it."""
        if self._token_id(marker) is None:
            return self._rule(f"[suffix={quoted(marker)}]: {free}")
        return f"{free} {self.marker(marker)}"

    def grammar(self, grammar: Grammar) -> str:
        """A term: what the grammar allows."""
        name = f"part{len(self._parts)}"
        self._parts.append(grammar.named(name))
        return f"@{name}"

    def source(self, start: str) -> str:
        """The whole for llguidance, where `start` are the terms of an answer. Raises RequestError if it is
        too long."""
        lark = "\n".join([f"start: {start}", *self._rules])
        text = json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *self._parts]})
        if len(text) > MAX_BYTES:
            raise RequestError(
                f"the grammar has {len(text)} bytes, {MAX_BYTES} are allowed", remedy="simplify it"
            )
        _check_multiples(text)
        return text

    def _rule(self, rest: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(name + rest)
        return name


def _check_multiples(text: str) -> None:
    """Several values may have to be met at once (allOf, $ref), so their common multiple counts."""
    multiple = 1
    for value in _MULTIPLE_OF.findall(text):
        try:
            digits = Decimal(value).normalize().as_tuple().digits
        except ArithmeticError:
            continue  # no number: the library says so
        multiple = math.lcm(multiple, max(1, int("".join(map(str, digits)))))
        if multiple > MAX_MULTIPLE:
            raise RequestError(
                f"multipleOf {value} makes a common multiple of {multiple} of all that are in the grammar, "
                f"{MAX_MULTIPLE} are allowed",
                remedy="leave multipleOf out",
            )


def quoted(text: str) -> str:
    """A text as a term. The library's reader takes any character but U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def one_of(terms: Iterable[str]) -> str:
    """A term: any of these."""
    return f"({' | '.join(terms)})"


def choice(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar(lark="start: " + " | ".join(quoted(text) for text in texts))


def regex(pattern: str) -> Grammar:
    """Texts that match as a whole, in the syntax of Rust's crate `regex`: no look-around, no references."""
    return Grammar(lark=f"start: /{_SPECIAL.sub(_in_slashes, pattern)}/")


def _in_regex(text: str) -> str:
    """A text between slashes."""
    return re.escape(text).replace("/", r"\/")


_SPECIAL = re.compile(r"\\(?s:.)|/|\n")
"""What may mean something else between slashes: escaped characters, slashes, line breaks."""


def _in_slashes(found: re.Match[str]) -> str:
    """Escaped once: another backslash before an escaped slash would end the expression there."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
