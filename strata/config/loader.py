"""YAML text -> Config. The document is walked as nodes, so every complaint has a line and a column."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strata.config.document import compose, entries, is_null, nearest, noun, place_of, read_text
from strata.config.kinds import Boolean, Integer, Kind, Location, Number, Text, Texts
from strata.config.schema import KINDS, Config, section_class
from strata.errors import ConfigError, RequestError

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
        text = read_text(file)
        values.base = file.resolve().parent
        _read_document(text, file, values)
    for override in overrides:
        _apply(override, values)
    return values.config(file)


def _read_document(text: str, file: Path, values: _Values) -> None:
    root = compose(text, file)
    if root is None or is_null(root):
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{place_of(file, root)}: the file holds a {noun(root)}, not sections",
            remedy="write sections with keys below them, as in configs/default.yaml",
        )
    for section, node, place in entries(root, file, "the top level"):
        if section not in KINDS:
            raise _unknown_section(section, place)
        _read_section(section, node, file, values)


def _read_section(section: str, node: yaml.Node, file: Path, values: _Values) -> None:
    if is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{place_of(file, node)}: section {section!r} holds a {noun(node)}, not keys",
            remedy=f"known keys of {section!r}: {', '.join(KINDS[section])}",
        )
    for key, value, place in entries(node, file, f"section {section!r}"):
        kind = KINDS[section].get(key)
        if kind is None:
            raise _unknown_key(section, key, place)
        values.put(section, key, _read_value(f"{section}.{key}", kind, value, file, values.base), place)


def _read_value(option: str, kind: Kind, node: yaml.Node, file: Path, base: Path | None) -> Any:
    if isinstance(kind, Texts) and isinstance(node, yaml.SequenceNode):
        return tuple(_read_scalar(option, kind, item, file, base) for item in node.value)
    value = _read_scalar(option, kind, node, file, base)
    return (value,) if isinstance(kind, Texts) else value


def _read_scalar(option: str, kind: Kind, node: yaml.Node, file: Path, base: Path | None) -> Any:
    place = place_of(file, node)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(
            f"{place}: {option} holds a {noun(node)}, not a single value",
            remedy=f"write {option.partition('.')[2]}: and one value in a line",
        )
    if is_null(node):
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
        raise ConfigError(
            f"{place}: {option}: {shown!r} {error}", remedy=f"configs/default.yaml says what {option} takes"
        ) from None


def _unknown_section(section: str, place: str) -> ConfigError:
    owner = next((name for name, kinds in KINDS.items() if section in kinds), None)
    remedy = f"{section!r} belongs into section {owner!r}" if owner else nearest(section, KINDS)
    return ConfigError(f"{place}: unknown section {section!r}", remedy=remedy)


def _unknown_key(section: str, key: str, place: str) -> ConfigError:
    owner = next((name for name, kinds in KINDS.items() if key in kinds), None)
    remedy = f"{key!r} belongs into section {owner!r}" if owner else nearest(key, KINDS[section])
    return ConfigError(f"{place}: unknown key {key!r} in section {section!r}", remedy=remedy)
