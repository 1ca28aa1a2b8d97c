"""Hermes and Qwen: {"name": "add", "arguments": {"a": 1}}, arguments streamed as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from strata.interfaces.server.formats.call_reader import CallPiece
from strata.interfaces.strict_json import JsonError, read_json

_STRING = r'"(?:[^"\\]|\\.)*"'
# The usual order. Any other is read when the object is complete.
_BEGIN = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL
)


class JsonCall:
    """One call. Nothing comes of text that is no such object."""

    def __init__(self) -> None:
        self._text = ""
        self._value: JsonObject | None = None

    def add(self, text: str) -> list[CallPiece]:
        """The name once the arguments begin, then the arguments to their last brace."""
        if self._value is not None:
            return _pieces(self._value.add(text))
        self._text += text
        begin = _BEGIN.match(self._text)
        if begin is None:
            return []
        self._value = JsonObject()
        name = CallPiece(str(json.loads(begin["name"], strict=False)))
        return [name, *_pieces(self._value.add(self._text[begin.end() :]))]

    def finish(self) -> list[CallPiece]:
        """A whole object in another order, with arguments as text, or without any."""
        if self._value is not None:
            return []
        try:
            value = read_json(self._text, strict=False)
        except JsonError:
            return []
        name = value.get("name") if isinstance(value, dict) else None
        return [CallPiece(name), CallPiece(None, _arguments(value))] if isinstance(name, str) else []


class JsonObject:
    """Lets a JSON object through to its closing brace, and nothing behind it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.closed = False

    def add(self, text: str) -> str:
        """The part of the text that belongs to the object."""
        for place, letter in enumerate(text):
            if self.closed:
                return text[:place]
            self._take(letter)
        return text

    def _take(self, letter: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            else:
                self._in_string = letter != '"'
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.closed = self._depth <= 0


def _pieces(text: str) -> list[CallPiece]:
    return [CallPiece(None, text)] if text else []


def _arguments(call: Mapping[str, Any]) -> str:
    """As JSON text; some models write the text of the object instead of the object."""
    value = call.get("arguments", call.get("parameters", {}))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
