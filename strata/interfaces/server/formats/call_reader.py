"""What all readers of tool calls have in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallPiece(NamedTuple):
    """A piece of a call: its name first and once, then its arguments as JSON text, in pieces."""

    name: str | None = None
    arguments: str = ""


class CallReader(Protocol):
    """Reads what stands between a format's begin and end markers."""

    def add(self, text: str) -> list[CallPiece]:
        """What is certain after this text."""

    def finish(self) -> list[CallPiece]:
        """The rest, at the end marker or at the end of the answer."""
