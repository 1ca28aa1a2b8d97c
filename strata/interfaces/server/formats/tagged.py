"""Answers with marked sections: <think>...</think>, <tool_call>...</tool_call> and the like."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strata.interfaces.server.formats.call_reader import CallPiece, CallReader
from strata.interfaces.server.output import CallDelta, Part
from strata.interfaces.tokenizer import well_formed


@dataclass(frozen=True)
class CallMarkers:
    """Where a call, or a block of them, begins and ends. ignored: markers around them that say nothing."""

    begin: str
    end: str
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """Markers of reasoning. open_at_start: the prompt has begun it already."""

    begin: str = "<think>"
    end: str = "</think>"
    open_at_start: bool = False


class CallCounter:
    """Turns the pieces of calls into deltas with index and id."""

    def __init__(self) -> None:
        self.count = 0

    def parts(self, pieces: Iterable[CallPiece]) -> list[Part]:
        """Each piece as a part of the answer."""
        return [self._part(piece) for piece in pieces]

    def _part(self, piece: CallPiece) -> Part:
        """Half a surrogate pair, which JSON can spell, must not get into an answer."""
        arguments = well_formed(piece.arguments)
        if piece.name is None:
            return Part(call=CallDelta(self.count - 1, arguments))
        self.count += 1
        index = f"call_{uuid.uuid4().hex[:24]}"
        return Part(call=CallDelta(self.count - 1, arguments, index, well_formed(piece.name)))


class TaggedOutput:
    """thinking, calls: None where the format, or the request, has none. reader: makes one for each call.

    White space around the sections belongs to the format and is left out. A section that is no call after all
    stays in the content as it was written.
    """

    def __init__(
        self, thinking: Thinking | None, calls: CallMarkers | None, reader: Callable[[], CallReader]
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._new_reader = reader
        self._counter = CallCounter()
        self._text = ""  # not read yet: it may be the beginning of a marker
        self._space = ""  # white space that counts only if something follows
        self._raw = ""  # of the call that is being read
        self._is_call = False  # whether anything came of it
        self._reader: CallReader | None = None
        self._reasoning = thinking is not None and thinking.open_at_start
        self._trim = self._reasoning

    def add(self, text: str) -> list[Part]:
        """What is certain now."""
        self._text += text
        parts: list[Part] = []
        while True:
            markers = self._markers()
            place, marker = first_marker(self._text, markers)
            if marker is None:
                keep = held_back(self._text, markers)
                parts += self._take(self._text[: len(self._text) - keep])
                self._text = self._text[len(self._text) - keep :]
                return parts
            parts += self._take(self._text[:place])
            self._text = self._text[place + len(marker) :]
            parts += self._turn(marker)

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = self._take(self._text)
        self._text = ""
        if self._reader is not None:
            return parts + self._end_call("")
        if not self._trim and not self._counter.count and self._space:
            parts.append(self._part(self._space))
        return parts

    def _markers(self) -> tuple[str, ...]:
        """Those that mean something where we are."""
        if self._reader is not None:
            assert self._calls is not None  # or there would be no reader
            return (self._calls.end,)
        if self._reasoning:
            assert self._thinking is not None
            return (self._thinking.end,)
        found = (self._thinking.begin,) if self._thinking is not None else ()
        return found + ((self._calls.begin, *self._calls.ignored) if self._calls is not None else ())

    def _turn(self, marker: str) -> list[Part]:
        """Another section begins."""
        if self._reader is not None:
            return self._end_call(marker)
        self._space = ""
        self._trim = True
        if self._calls is not None and marker == self._calls.begin:
            self._reader, self._raw, self._is_call = self._new_reader(), marker, False
        elif self._thinking is not None:
            self._reasoning = marker == self._thinking.begin
        return []

    def _take(self, text: str) -> list[Part]:
        if self._reader is not None:
            self._raw += text
            return self._called(self._reader.add(text))
        if self._trim:
            text = text.lstrip()
        if not text:
            return []
        self._trim = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [self._part(shown)] if shown else []

    def _part(self, text: str) -> Part:
        return Part(reasoning=text) if self._reasoning else Part(text)

    def _called(self, pieces: list[CallPiece]) -> list[Part]:
        self._is_call = self._is_call or bool(pieces)
        return self._counter.parts(pieces)

    def _end_call(self, marker: str) -> list[Part]:
        assert self._reader is not None
        parts = self._called(self._reader.finish())
        self._reader = None
        return parts if self._is_call else [Part(self._raw + marker)]


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """The first marker in a text and its place; the longest of those that begin there."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    place, _, first = min(found, default=(-1, 0, None))
    return place, first


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in markers)), 0)
