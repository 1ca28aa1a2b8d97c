"""YAML documents as nodes, so that every complaint has a file, a line and a column."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from strata.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_MAX_KEY = 64
_MAX_NODES = 4000
_EXAMPLE = "configs/default.yaml shows what a file looks like"
"""default.yaml has 70. Composing one takes up to 35 us, which made 18 s of a megabyte."""


class _TooManyNodesError(Exception):
    """Raised by _Loader. line: from 1."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line


class _Loader(yaml.SafeLoader):
    """Stops at more nodes than a configuration has."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As SafeLoader's, but counting."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise _TooManyNodesError(self.peek_event().start_mark.line + 1)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def read_text(path: Path) -> str:
    """The text of a file; ConfigError when it cannot be read, is huge or is not UTF-8."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would wait for a writer
            raise ConfigError(f"{path}: a pipe or device, not a file", remedy="give the path of a YAML file")
        with path.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {reason}", remedy="give the path of a YAML file, see configs/") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: larger than {_MAX_FILE_BYTES} bytes: this is no configuration file", remedy=_EXAMPLE
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8", remedy="save the file as UTF-8"
        ) from None


def compose(text: str, file: Path) -> yaml.Node | None:
    """The only document's root node."""
    try:
        documents = list(yaml.compose_all(text, Loader=_Loader))
    except _TooManyNodesError as error:
        raise ConfigError(
            f"{file}:{error.line}: more than {_MAX_NODES} keys and values: this is no configuration file",
            remedy=_EXAMPLE,
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, file) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{file}:{line}: the character #x{error.character:04x} is not allowed", remedy="remove it"
        ) from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply: it has two levels", remedy=_EXAMPLE) from None
    if len(documents) > 1:
        raise ConfigError(
            f"{place_of(file, documents[1])}: a second document begins here",
            remedy="a configuration is one document: remove the --- line or the rest",
        )
    return documents[0] if documents else None


def _syntax_error(error: yaml.MarkedYAMLError, file: Path) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
    problem = error.problem or error.context or "not valid YAML"
    if "'\\t'" in problem or "tab" in problem:
        return ConfigError(f"{place}: a tab in the indentation", remedy="YAML is indented with spaces only")
    return ConfigError(f"{place}: not valid YAML: {problem}", remedy=_EXAMPLE)


def entries(node: yaml.MappingNode, file: Path, where: str) -> Iterable[tuple[str, yaml.Node, str]]:
    """Key, value node and place of each entry; duplicates and keys that are no plain words are refused."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        place = place_of(file, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"{place}: a {noun(key_node)} is used as a key in {where}", remedy="keys are plain words"
            )
        key = key_node.value
        if len(key) > _MAX_KEY:
            raise ConfigError(
                f"{place}: a key of {len(key)} characters in {where}, the longest has {_MAX_KEY}",
                remedy="keys are plain words",
            )
        if key in seen:
            raise ConfigError(
                f"{place}: {key!r} stands twice in {where}; the first is in line {seen[key]}",
                remedy="remove one of them",
            )
        seen[key] = key_node.start_mark.line + 1
        yield key, value_node, place


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy for a word that is not among the known ones."""
    names = list(known)
    matches = difflib.get_close_matches(word.replace("-", "_").lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return f"{hint}known here: {', '.join(names)}"


def place_of(file: Path, node: yaml.Node) -> str:
    """ "file:line:column"."""
    return f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def is_null(node: yaml.Node) -> bool:
    """Whether nothing, or an unquoted null, stands there."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.tag.endswith(":null")


def noun(node: yaml.Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, yaml.SequenceNode):
        return "list"
    return "mapping" if isinstance(node, yaml.MappingNode) else "single value"
