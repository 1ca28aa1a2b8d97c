"""What the documents point at is there: files, anchors, commands and their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from strata.interfaces.cli import strata

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`(strata [^`]+)`(?!`)")
FOLDERS = "|".join(("configs", "csrc", "docs", "scripts", "strata", "tests"))
NAMED_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w)(?:::\w+)?`")


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of Strata, as words: lines of bash blocks, with what follows a backslash, and `spans`."""
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *(span.replace("\n", " ") for span in SPAN.findall(text))]:
        for part in re.split(r"\||&&|;", line):
            words = shlex.split(part, comments=True)
            if words[:1] == ["strata"] and len(words) > 1:
                yield words[1:]


def unknown(words: list[str]) -> list[str]:
    """Those words that are options which the command has not, or no command."""
    context, command = click.Context(strata), strata
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return [name]
        command = found  # type: ignore[assignment]
    known = {option for parameter in command.get_params(context) for option in parameter.opts}
    known |= {"-h", "--help", "--debug"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    for name in NAMED_FILE.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_have_the_options_that_are_shown(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        assert unknown(words) == [], " ".join(words)


def test_commands_are_found_and_mistakes_seen() -> None:
    shown = "`strata run --a 1`\n```bash\nx | strata eval kv \\\n  demo -m 2 && echo  # strata no\n```\n"
    assert list(commands(shown)) == [["eval", "kv", "demo", "-m", "2"], ["run", "--a", "1"]]
    assert len(list(commands((ROOT / "README.md").read_text(encoding="utf-8")))) > 15
    assert unknown(["run", "--tempp", "0", "--temp", "0", "-c", "9"]) == ["--tempp"]
    assert unknown(["eval", "kvv"]) == ["kvv"] and unknown(["eval", "kv", "--nope=1"]) == ["--nope=1"]
