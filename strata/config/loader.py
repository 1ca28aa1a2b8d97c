"""YAML text -> Config. The document is walked as nodes, so every complaint has a line and a column."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strata.config.kinds import Boolean, Integer, Kind, Location, Number, Text, Texts
from strata.config.schema import KINDS, Config, section_class
from strata.errors import ConfigError, RequestError

_MAX_FILE_BYTES = 1 << 20
_MAX_KEY = 64
_TEXTUAL: tuple[type, ...] = (Text, Texts, Location)
_UNQUOTED: tuple[type, ...] = (Integer, Number, Boolean)


@dataclass(frozen=True)
class Override:
    """One value from the command line: `option` is "section.key", `origin` the flag that gave it."""

    option: str
    text: str
    origin: str

    @classmethod
    def parse(cls, argument: str) -> Override:
        """From the argument of --set, "section.key=value"."""
        option, equals, text = argument.partition("=")
        if not equals or option.count(".") != 1:
            raise ConfigError(
                f"--set {argument!r} is not section.key=value", remedy="for example: --set kv.size=4GiB"
            )
        return cls(option.strip(), text, f"--set {option.strip()}")


@dataclass
class _Values:
    """Options read so far; later ones replace earlier ones."""

    base: Path | None = None
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, section: str, key: str, value: Any, origin: str) -> None:
        self._accept(section, key, value, origin)
        self.values.setdefault(section, {})[key] = value
        self.origins[f"{section}.{key}"] = origin

    def _accept(self, section: str, key: str, value: Any, origin: str) -> None:
        """The section's own class has the last word on a value."""
        try:
            section_class(section)(**{key: value})
        except RequestError as error:
            raise ConfigError(f"{origin}: {section}.{key}: {error.cause}", remedy=error.remedy) from None

    def config(self, file: Path | None) -> Config:
        sections = {name: section_class(name)(**values) for name, values in self.values.items()}
        return dataclasses.replace(Config(), **sections, file=file, origins=self.origins)


def load_config(path: Path | str | None, overrides: Iterable[Override] = ()) -> Config:
    """The configuration of a file (None: defaults only) with overrides applied in order.

    Raises ConfigError that names the place, the section, the key and the nearest valid key.
    """
    file = None if path is None else Path(path)
    values = _Values()
    if file is not None:
        text = _read_text(file)
        values.base = file.resolve().parent
        _read_document(text, file, values)
    for override in overrides:
        _apply(override, values)
    return values.config(file)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {reason}", remedy="give the path of a YAML file, see configs/") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes: this is no configuration file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8") from None


def _read_document(text: str, file: Path, values: _Values) -> None:
    root = _compose(text, file)
    if root is None or _is_null(root):
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{_place(file, root)}: the file holds a {_noun(root)}, not sections",
            remedy="write sections with keys below them, as in configs/default.yaml",
        )
    for section, node, place in _entries(root, file, "the top level"):
        if section not in KINDS:
            raise _unknown_section(section, place)
        _read_section(section, node, file, values)


def _compose(text: str, file: Path) -> yaml.Node | None:
    """The only document's root node."""
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, file) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{file}:{line}: the character #x{error.character:04x} is not allowed") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply: a configuration has two levels") from None
    if len(documents) > 1:
        raise ConfigError(
            f"{_place(file, documents[1])}: a second document begins here",
            remedy="a configuration is one document: remove the --- line or the rest",
        )
    return documents[0] if documents else None


def _syntax_error(error: yaml.MarkedYAMLError, file: Path) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
    problem = error.problem or error.context or "not valid YAML"
    if "'\\t'" in problem or "tab" in problem:
        return ConfigError(f"{place}: a tab in the indentation", remedy="YAML is indented with spaces only")
    return ConfigError(f"{place}: not valid YAML: {problem}")


def _read_section(section: str, node: yaml.Node, file: Path, values: _Values) -> None:
    if _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{_place(file, node)}: section {section!r} holds a {_noun(node)}, not keys",
            remedy=f"known keys of {section!r}: {', '.join(KINDS[section])}",
        )
    for key, value, place in _entries(node, file, f"section {section!r}"):
        kind = KINDS[section].get(key)
        if kind is None:
            raise _unknown_key(section, key, place)
        values.put(section, key, _read_value(f"{section}.{key}", kind, value, file, values.base), place)


def _entries(node: yaml.MappingNode, file: Path, where: str) -> Iterable[tuple[str, yaml.Node, str]]:
    """Key, value node and place of each entry; duplicates and keys that are no plain words are refused."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        place = _place(file, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a {_noun(key_node)} is used as a key in {where}")
        key = key_node.value
        if len(key) > _MAX_KEY:
            raise ConfigError(
                f"{place}: a key of {len(key)} characters in {where}, the longest has {_MAX_KEY}"
            )
        if key in seen:
            raise ConfigError(f"{place}: {key!r} stands twice in {where}; the first is in line {seen[key]}")
        seen[key] = key_node.start_mark.line + 1
        yield key, value_node, place


def _read_value(option: str, kind: Kind, node: yaml.Node, file: Path, base: Path | None) -> Any:
    if isinstance(kind, Texts) and isinstance(node, yaml.SequenceNode):
        return tuple(_read_scalar(option, kind, item, file, base) for item in node.value)
    value = _read_scalar(option, kind, node, file, base)
    return (value,) if isinstance(kind, Texts) else value


def _read_scalar(option: str, kind: Kind, node: yaml.Node, file: Path, base: Path | None) -> Any:
    place = _place(file, node)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{place}: {option} holds a {_noun(node)}, not a single value")
    if _is_null(node):
        raise ConfigError(f"{place}: {option} has no value", remedy="give one, or remove the line")
    if node.style is None:
        _refuse_guess(option, kind, node, place)
    elif isinstance(kind, _UNQUOTED):
        raise ConfigError(f'{place}: {option}: "{node.value}" is text', remedy="remove the quotes")
    return _parse(option, kind, node.value, place, base)


def _refuse_guess(option: str, kind: Kind, node: yaml.ScalarNode, place: str) -> None:
    """Text options refuse an unquoted word that YAML takes for something else, such as `no` or `1.10`."""
    word = node.tag.rpartition(":")[2]
    if isinstance(kind, _TEXTUAL) and word != "str":
        meaning = {"bool": "yes or no", "int": "a number", "float": "a number", "timestamp": "a date"}
        raise ConfigError(
            f"{place}: {option}: {node.value} without quotes means {meaning.get(word, word)} in YAML",
            remedy=f'for text write "{node.value}"',
        )


def _apply(override: Override, values: _Values) -> None:
    section, _, key = override.option.partition(".")
    if section not in KINDS:
        raise _unknown_section(section, override.origin)
    kind = KINDS[section].get(key)
    if kind is None:
        raise _unknown_key(section, key, override.origin)
    value = _parse(override.option, kind, override.text, override.origin, None)
    if isinstance(kind, Texts):  # a repeated --stop adds up, but replaces what the file says
        earlier = values.values.get(section, {}).get(key, ())
        value = (*earlier, value) if values.origins.get(override.option) == override.origin else (value,)
    values.put(section, key, value, override.origin)


def _parse(option: str, kind: Kind, text: str, place: str, base: Path | None) -> Any:
    try:
        return kind.parse(text, base=base)
    except ValueError as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise ConfigError(f"{place}: {option}: {shown!r} {error}") from None


def _unknown_section(section: str, place: str) -> ConfigError:
    owner = next((name for name, kinds in KINDS.items() if section in kinds), None)
    remedy = f"{section!r} belongs into section {owner!r}" if owner else _nearest(section, KINDS)
    return ConfigError(f"{place}: unknown section {section!r}", remedy=remedy)


def _unknown_key(section: str, key: str, place: str) -> ConfigError:
    owner = next((name for name, kinds in KINDS.items() if key in kinds), None)
    remedy = f"{key!r} belongs into section {owner!r}" if owner else _nearest(key, KINDS[section])
    return ConfigError(f"{place}: unknown key {key!r} in section {section!r}", remedy=remedy)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    matches = difflib.get_close_matches(word.replace("-", "_").lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return f"{hint}known here: {', '.join(names)}"


def _place(file: Path, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.tag.endswith(":null")


def _noun(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "list"
    return "mapping" if isinstance(node, yaml.MappingNode) else "single value"
