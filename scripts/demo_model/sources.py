"""Readers of the unpacked source packages: each yields clean documents of one domain."""

from __future__ import annotations

import json
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

PIECE = 6000  # characters per document: longer texts are cut at paragraph borders
CHATTERBOT_TOPICS = ("science", "computers", "trivia", "food", "sports", "literature", "coding", "greetings")


def tidy(text: str) -> str:
    """No trailing blanks, at most one empty line in a row."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def pieces(paragraphs: list[str], joiner: str = "\n\n") -> Iterator[str]:
    """Consecutive paragraphs joined into documents of about PIECE characters."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) > PIECE:
            yield joiner.join(held)
            held = []
    if held:
        yield joiner.join(held)


def _strings(blob: bytes) -> Iterator[str]:
    """The character strings of one serialized R object (XDR): type 9, length, bytes."""
    for match in re.finditer(rb"\x00[\x00\x04\x08][\x00\x80]\x09", blob):
        (size,) = struct.unpack(">i", blob[match.end() : match.end() + 4])
        if 0 <= size < 4_000_000:
            yield blob[match.end() + 4 : match.end() + 4 + size].decode("utf-8", "ignore")


def _lazy_records(data: bytes) -> Iterator[bytes]:
    """Records of an R lazy-load database: big-endian size, then a zlib stream (or xz/bzip2, skipped)."""
    for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        try:
            yield zlib.decompressobj().decompress(data[match.start() :])
        except zlib.error:
            continue  # the two bytes were not the head of a stream


def novels(folder: Path) -> Iterator[str]:
    """Public-domain novels: Jane Austen's (janeaustenr) and Moby Dick (tokenizers)."""
    for path in sorted(folder.glob("r-cran-*/usr/lib/R/site-library/*/data/Rdata.rdb")):
        for record in _lazy_records(path.read_bytes()):
            lines = list(_strings(record))
            if sum(map(len, lines)) < 50_000:
                continue
            text = "\n".join(lines).replace("\r", "")
            text = re.split(r"\*\*\* ?END OF TH", re.split(r"\*\*\* ?START OF .*", text)[-1])[0]
            paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text)]
            yield from pieces([p for p in paragraphs if p])


class _Text(HTMLParser):
    """Visible text of a page, one line per block element."""

    BLOCKS: ClassVar = {"p", "h1", "h2", "h3", "h4", "li", "td", "pre", "div"}
    HIDDEN: ClassVar = {"script", "style", "nav", "head", "aside"}

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def office_help(folder: Path) -> Iterator[str]:
    """LibreOffice help pages as plain text."""
    for path in sorted(folder.glob("libreoffice-help-en-us/usr/share/libreoffice/help/en-US/text/**/*.html")):
        parser = _Text()
        parser.feed(path.read_text(errors="replace"))
        lines = [line.strip() for line in "".join(parser.parts).split("\n")]
        yield from pieces([line for line in lines if len(line) > 30], "\n")


def python_manual(folder: Path) -> Iterator[str]:
    """The Python manual's reStructuredText sources."""
    for path in sorted(folder.glob("python3.11-doc/usr/share/doc/python3.11/html/_sources/**/*.txt")):
        yield from pieces(tidy(path.read_text(errors="replace")).split("\n\n"))


def python_code() -> Iterator[str]:
    """The standard library of the running interpreter, without tests and generated tables."""
    skip = re.compile(r"/(site-packages|dist-packages|test|tests|idlelib|encodings|pydoc_data|lib2to3)/")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not skip.search(str(path)):
            yield from pieces(tidy(path.read_text(errors="replace")).split("\n\n"))


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, str) and len(node) > 200:
        yield re.sub(r"\s*\+\+\s*", " ", node)


def factbook_json(folder: Path) -> Iterator[str]:
    """Country profiles as indented JSON, cut into pieces."""
    for path in sorted(folder.glob("*/*.json")):
        text = json.dumps(json.loads(path.read_text()), indent=2, ensure_ascii=False)
        yield from pieces(text.split("\n"), "\n")


def factbook_prose(folder: Path) -> Iterator[str]:
    """The longer texts of each country profile: background, economy, disputes."""
    for path in sorted(folder.glob("*/*.json")):
        yield from pieces(list(_leaves(json.loads(path.read_text()))))


def chatterbot(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Question and answer pairs of the harmless topics."""
    for topic in CHATTERBOT_TOPICS:
        for path in folder.glob(f"chatterbot_corpus-*/chatterbot_corpus/data/english/{topic}.yml"):
            question, pairs = "", []
            for line in path.read_text(encoding="utf8").split("\n"):
                value = line[4:].strip().strip("\"'")
                if line.startswith("- - "):
                    question = value
                elif line.startswith("  - ") and question and value:
                    pairs.append((question, value))
            yield pairs
