"""gpt-oss: messages with a header (channel, recipient) and a body.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...; a call has its
recipient in the header: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>.
The prompt ends with <|start|>assistant, so an answer begins inside a header.
"""

from __future__ import annotations

import re

from strata.interfaces.server.formats.call_reader import CallPiece
from strata.interfaces.server.formats.tagged import CallCounter, first_marker, held_back
from strata.interfaces.server.output import Part

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
MARKERS = (_BODY, *_ENDS, "<|channel|>", "<|constrain|>")
ANALYSIS, ANALYSIS_END = "<|channel|>analysis<|message|>", "<|end|>"
HANDED_OVER = "<|end|><|start|>assistant"
"""Behind reasoning: the model chooses what follows."""
TO_THE_FINAL = f"{HANDED_OVER}<|channel|>final<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyOutput:
    """The final channel is content, analysis is reasoning, commentary to a function is a call."""

    def __init__(self) -> None:
        self._counter = CallCounter()
        self._text = ""
        self._header = ""
        self._in_body = False
        self._channel = "final"
        self._called = False

    def add(self, text: str) -> list[Part]:
        """What is certain now."""
        self._text += text
        parts: list[Part] = []
        while True:
            markers = _ENDS if self._in_body else (_BODY,)
            place, marker = first_marker(self._text, markers)
            if marker is None:
                keep = held_back(self._text, markers) if self._in_body else len(self._text)
                parts += self._take(self._text[: len(self._text) - keep])
                self._text = self._text[len(self._text) - keep :]
                return parts
            before, self._text = self._text[:place], self._text[place + len(marker) :]
            if self._in_body:
                parts += self._take(before)
                self._in_body = False
            else:
                parts += self._open(before)

    def finish(self) -> list[Part]:
        """The rest of a body; a header without one says nothing. Text without any header is content."""
        rest, self._text = self._text, ""
        if self._in_body:
            return self._take(rest)
        bare = rest and not any(marker in rest for marker in MARKERS) and not self._header
        return [Part(rest)] if bare else []

    def _open(self, header: str) -> list[Part]:
        self._in_body, self._header = True, header
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._called = recipient is not None
        return self._counter.parts([CallPiece(recipient[1])]) if recipient else []

    def _take(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._called:
            return self._counter.parts([CallPiece(None, text)])
        return [Part(reasoning=text) if self._channel == "analysis" else Part(text)]
