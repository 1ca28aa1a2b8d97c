"""GLM, Qwen3-Coder, MiniMax: a name and one element for each argument, e.g.

    add                                    <function=add>                  <invoke name="add">
    <arg_key>a</arg_key>                   <parameter=a>                   <parameter name="a">1</parameter>
    <arg_value>1</arg_value>               1                               </invoke>
                                           </parameter>
                                           </function>

Values are bare, so the tool's schema must say whether 1 is a number or a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.interfaces.server.formats.call_reader import CallPiece
from strata.interfaces.strict_json import JsonError, read_json


@dataclass(frozen=True)
class KeyedStyle:
    """name: the call's beginning, group 1 its name. argument: groups 1 and 2. end: of the call."""

    name: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]


def _style(name: str, argument: str, end: str) -> KeyedStyle:
    return KeyedStyle(re.compile(name), re.compile(argument, re.DOTALL), re.compile(end))


GLM = _style(
    r"\s*([^\s<]+)(?=\s*(?:\n|<|\Z))",
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    r"(?!)",
)
CODER = _style(r"\s*<function=([^>]+)>", r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>", r"\s*</function>")
MINIMAX = _style(
    r'\s*<invoke name="([^"]+)">', r'\s*<parameter name="([^"]+)">(.*?)</parameter>', r"\s*</invoke>"
)


class KeyedCall:
    """Calls of one block. tools: the functions that may be called, as the request gives them."""

    def __init__(self, style: KeyedStyle, tools: Mapping[str, Any]) -> None:
        self._style = style
        self._tools = tools
        self._text = ""
        self._name: str | None = None
        self._count = 0

    def add(self, text: str) -> list[CallPiece]:
        """The name and each argument when it is complete."""
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[CallPiece]:
        """Closes the call that is open."""
        pieces = self._read(ended=True)
        return pieces + (self._close() if self._name is not None else [])

    def _read(self, *, ended: bool) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        while True:
            if self._name is None:
                found = self._style.name.match(self._text)
                # A name that reaches the end of the text may go on.
                if found is None or (found.end() == len(self._text) and not ended):
                    return pieces
                self._name, self._count = found[1], 0
                pieces.append(CallPiece(self._name))
            elif found := self._style.argument.match(self._text):
                pieces.append(self._argument(found[1].strip(), found[2]))
            elif found := self._style.end.match(self._text):
                pieces += self._close()
            else:
                return pieces
            self._text = self._text[found.end() :]

    def _argument(self, key: str, text: str) -> CallPiece:
        value = json.dumps(self._value(key, text), ensure_ascii=False)
        self._count += 1
        return CallPiece(
            None, f"{', ' if self._count > 1 else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
        )

    def _close(self) -> list[CallPiece]:
        self._name = None
        return [CallPiece(None, "}" if self._count else "{}")]

    def _value(self, key: str, text: str) -> Any:
        """Text where the schema says so, else JSON if it is some."""
        function = self._tools.get(self._name or "") or {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        schema = properties.get(key) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and schema.get("type") == "string":
            return text
        try:
            return read_json(text)
        except JsonError:
            return text
