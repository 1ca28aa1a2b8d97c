"""DeepSeek and Kimi: a name, a separator, and the arguments as JSON, e.g. `add<|tool_sep|>{"a": 1}`."""

from __future__ import annotations

import re

from strata.interfaces.server.formats.call_reader import CallPiece
from strata.interfaces.server.formats.json_call import JsonObject

DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


class NamedCall:
    """One call. DeepSeek V3 and R1 write `function` before the separator, name and fence behind it."""

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._text = ""
        self._named = False
        self._value = JsonObject()

    def add(self, text: str) -> list[CallPiece]:
        """The name when the arguments begin, then the arguments."""
        self._text += text
        before, separator, after = self._text.partition(self._separator)
        brace = after.find("{")
        if not self._named:
            if not separator or brace < 0:
                return []
            self._named = True
            self._text = ""
            return [CallPiece(self._name(before, after[:brace])), *self._arguments(after[brace:])]
        self._text = ""
        return self._arguments(text)

    def finish(self) -> list[CallPiece]:
        """Arguments that were cut off stay as they are; without any there is no call."""
        return []

    def _name(self, before: str, between: str) -> str:
        name = before.strip()
        if name == "function" and between.strip():
            name = between.strip().partition("\n")[0].strip()
        match = _KIMI_NAME.fullmatch(name)
        return match[1] if self._separator == KIMI_SEPARATOR and match else name

    def _arguments(self, text: str) -> list[CallPiece]:
        taken = "" if self._value.closed else self._value.add(text)
        return [CallPiece(None, taken)] if taken else []
