"""What an answer's text is made of: content, reasoning, tool calls. One parser per family of formats."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A piece of a tool call. call counts the answer's calls; id and name come with a call's first piece."""

    call: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Part(NamedTuple):
    """A piece of an answer; one of the three is set."""

    text: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class OutputParser(Protocol):
    """Takes an answer's text as it grows. Pieces are given out as soon as it is certain what they are."""

    def add(self, text: str) -> list[Part]:
        """What is certain after this text."""

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer."""


class PlainOutput:
    """All is content."""

    def add(self, text: str) -> list[Part]:
        """The text."""
        return [Part(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing is ever held back."""
        return []
