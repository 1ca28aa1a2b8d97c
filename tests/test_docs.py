"""What the documents point at is there: files, anchors, commands and their options."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from strata.config import Override, load_config
from strata.errors import UsageError
from strata.interfaces.cli import strata

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]*\b(?:strata|scripts/\w+\.(?:py|sh)) [^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\.\.\.|…|<|\[|^[A-Z]$")
FOLDERS = "|".join(("configs", "csrc", "docs", "scripts", "strata", "tests"))
NAMED_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w)(?:::\w+)?`")


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lines(text: str) -> Iterator[list[str]]:
    """Command lines as words: those of bash blocks, with what follows a backslash, and `spans`."""
    found = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*found, *(span.replace("\n", " ") for span in SPAN.findall(text))]:
        for part in re.split(r"\||&&|;|&$", line):
            yield shlex.split(part.replace("'", "") if part.count("'") % 2 else part, comments=True)


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of Strata without what stands before it: variables, `.venv/bin/`, `time`, `chrt -f 1`."""
    for words in lines(text):
        at = next(
            (i for i, word in enumerate(words) if word == "strata" or word.endswith("bin/strata")), None
        )
        if (
            at is not None
            and at + 1 < len(words)
            and words[0] not in ("cd", "ls", "pip", "git", "ruff", "mypy")
        ):
            yield words[at + 1 :]


def scripts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Scripts of the repository that are run, and their options."""
    for words in lines(text):
        for at, word in enumerate(words):
            if re.fullmatch(r"(?:\./)?scripts/[\w/]+\.(?:py|sh)", word):
                options = [item.split("=")[0] for item in words[at + 1 :] if re.match(r"--[a-z]", item)]
                yield word.removeprefix("./"), options


def subcommand(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """The command that the words name, None where there is none, and its own words."""
    context, command = click.Context(strata), strata
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return None, [name]
        command = found  # type: ignore[assignment]
    return command, words


def unknown(words: list[str]) -> list[str]:
    """Those words that are options which the command has not, or no command."""
    command, words = subcommand(words)
    if command is None:
        return words
    context = click.Context(command)
    known = {option for parameter in command.get_params(context) for option in parameter.opts}
    known |= {"-h", "--help", "--debug"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]


def misunderstood(words: list[str]) -> str:
    """What is wrong with the values of a command line that has no placeholder; else of its settings."""
    for before, setting in itertools.pairwise(words):
        if before.startswith("--set") and not PLACEHOLDER.search(setting):
            try:
                load_config(None, [Override.parse(setting)])
            except UsageError as error:
                return str(error)
    command, own = subcommand(words)
    if command is None or isinstance(command, click.Group) or any(map(PLACEHOLDER.search, own)):
        return ""
    try:
        command.make_context("", own)
    except (click.MissingParameter, click.BadOptionUsage, click.exceptions.Exit):
        return ""  # prose names a command or an option alone; --help
    except click.ClickException as error:
        return error.format_message()
    return ""


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_whole_command_lines_are_understood(document: Path) -> None:
    """With their values, but for placeholders; options of the configuration as well."""
    for words in commands(document.read_text(encoding="utf-8")):
        wrong = misunderstood(words)
        assert not wrong, f"{' '.join(words)}: {wrong}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_scripts_have_the_options_that_are_shown(document: Path) -> None:
    for script, options in scripts(document.read_text(encoding="utf-8")):
        source = (ROOT / script).read_text(encoding="utf-8")
        assert [option for option in options if option not in source] == [], script


def test_commands_are_found_and_mistakes_seen() -> None:
    shown = "`strata run --a 1`\n```bash\nx | strata eval kv \\\n  demo -m 2 && echo  # strata no\n```\n"
    assert list(commands(shown)) == [["eval", "kv", "demo", "-m", "2"], ["run", "--a", "1"]]
    assert len(list(commands((ROOT / "README.md").read_text(encoding="utf-8")))) > 15
    assert unknown(["run", "--tempp", "0", "--temp", "0", "-c", "9"]) == ["--tempp"]
    prefixed = (
        "`STRATA_ISA=avx2 strata bench demo` and `.venv/bin/strata run demo` and `x scripts/a.py --b 1 c`"
    )
    assert list(commands(prefixed)) == [["bench", "demo"], ["run", "demo"]]
    assert list(scripts(prefixed)) == [("scripts/a.py", ["--b"])]
    assert "0 is not in the range" in misunderstood(["bench", "demo", "-r", "0"])
    assert "dtyp" in misunderstood(["run", "demo", "--set", "kv.dtyp=int8"])
    assert misunderstood(["bench", "STORE", "-r", "N"]) == "" == misunderstood(["run", "--temp", "0"])
    assert unknown(["eval", "kvv"]) == ["kvv"] and unknown(["eval", "kv", "--nope=1"]) == ["--nope=1"]
