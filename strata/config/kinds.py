"""What values an option takes. A kind turns text into a value or says, in one phrase, why it cannot.

YAML's own guesses (`yes` is true, `1e3` is text, `12:30` is a number) are never used: every kind reads
the characters that stand in the file.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.config.units import format_size, parse_size

_NODES = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][+-]?\d{1,3})?", re.ASCII)


class Kind(ABC):
    """The values of one option."""

    def parse(self, text: str, *, base: Path | None) -> Any:
        """The value, or ValueError with a phrase that continues "option: 'text' ...".

        base: the folder that relative paths start from (None: the working directory).
        """
        return self._parse(text, base)

    def show(self, value: Any) -> str:
        """The value for people; sizes are echoed in bytes."""
        return str(value)

    @abstractmethod
    def _parse(self, text: str, base: Path | None) -> Any: ...


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number. `word` stands for None ("auto", "random"); so does `word_number` (llama.cpp's -1).

    The number must be divisible by `multiple`.
    """

    low: int
    high: int
    word: str = ""
    word_number: int | None = None
    multiple: int = 1

    def _parse(self, text: str, base: Path | None) -> int | None:
        if self.word and text == self.word:
            return None
        alternative = f" or {self.word}" if self.word else ""
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"is not a whole number{alternative}")
        value = int(text)
        if value == self.word_number:
            return None
        if not self.low <= value <= self.high:
            raise ValueError(f"is out of range; allowed: {self.low} to {self.high}{alternative}")
        if value % self.multiple:
            raise ValueError(f"is not a multiple of {self.multiple}")
        return value

    def show(self, value: Any) -> str:
        """The number, or the word for none."""
        return self.word if value is None else str(value)


@dataclass(frozen=True)
class Number(Kind):
    """A decimal number, finite."""

    low: float
    high: float

    def _parse(self, text: str, base: Path | None) -> float:
        if not _NUMBER.fullmatch(text):
            raise ValueError("is not a number")
        value = float(text)
        if not self.low <= value <= self.high:
            raise ValueError(f"is out of range; allowed: {self.low:g} to {self.high:g}")
        return value


@dataclass(frozen=True)
class Size(Kind):
    """Bytes, written with a unit; `auto` is None where that is allowed."""

    low: int
    auto: bool = True

    def _parse(self, text: str, base: Path | None) -> int | None:
        if self.auto and text == "auto":
            return None
        size = parse_size(text)
        if size < self.low:
            raise ValueError(
                f"is {size} bytes; at least {format_size(self.low)} ({self.low} bytes) is needed"
            )
        return size

    def show(self, value: Any) -> str:
        """For example "4 GiB (4294967296 bytes)"."""
        return "auto" if value is None else f"{format_size(value)} ({value} bytes)"


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def _parse(self, text: str, base: Path | None) -> str:
        if text not in self.words:
            raise ValueError(f"is not one of: {', '.join(self.words)}")
        return text


@dataclass(frozen=True)
class NodesOr(Kind):
    """One of a few words, or a list of memory nodes as numactl writes it: 0, 0-1, 0,2."""

    words: tuple[str, ...]

    def _parse(self, text: str, base: Path | None) -> str | tuple[int, ...]:
        if text in self.words:
            return text
        nodes: set[int] = set()
        for part in text.split(","):
            found = _NODES.fullmatch(part.strip())
            if not found:
                raise ValueError(f"is not one of: {', '.join(self.words)}, nor a list of nodes like 0-1")
            first, last = int(found[1]), int(found[2] or found[1])
            if first > last:
                raise ValueError(f"has the range {first}-{last}: write the lower node first")
            nodes.update(range(first, last + 1))
        return tuple(sorted(nodes))

    def show(self, value: Any) -> str:
        """The word, or "0,1"."""
        return value if isinstance(value, str) else ",".join(map(str, value))


@dataclass(frozen=True)
class Boolean(Kind):
    """true or false, nothing else: YAML 1.1 also reads yes, no, on and off, which YAML 1.2 calls text."""

    def _parse(self, text: str, base: Path | None) -> bool:
        if text not in ("true", "false"):
            raise ValueError("is not true or false (yes, no, on, off and 1 are not accepted)")
        return text == "true"

    def show(self, value: Any) -> str:
        """As it is written."""
        return str(value).lower()


@dataclass(frozen=True)
class Text(Kind):
    """Any text. empty: whether it may have nothing in it."""

    empty: bool = True

    def _parse(self, text: str, base: Path | None) -> str:
        if not self.empty and not text.strip():
            raise ValueError("is empty")
        if "\0" in text:
            raise ValueError("contains a NUL character")
        return text


@dataclass(frozen=True)
class Texts(Kind):
    """A list of non-empty texts; one text alone is a list of one. The loader parses item by item."""

    def _parse(self, text: str, base: Path | None) -> str:
        if not text:
            raise ValueError("is empty")
        return text

    def show(self, value: Any) -> str:
        """As YAML has it: ["###", "User:"]."""
        return json.dumps(list(value), ensure_ascii=False)


@dataclass(frozen=True)
class Location(Kind):
    """A path, made absolute from the folder of the configuration file; `words` are no paths but names."""

    words: tuple[str, ...] = ("",)

    def _parse(self, text: str, base: Path | None) -> str:
        if text in self.words:
            return text
        if "\0" in text:
            raise ValueError("contains a NUL character")
        if text.startswith("~"):
            return str(Path(text).expanduser())
        return str((base or Path.cwd()) / text)
