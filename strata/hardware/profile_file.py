"""Hardware profiles as YAML: other people's machines, and machines that are not there yet (`--hardware`).

The files in `profiles/` show every key. Sizes have units as in configurations; every speed says where its
figure comes from (`profile.Source`).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import yaml

from strata.config.document import compose, entries, is_null, nearest, noun, place_of, read_text
from strata.config.units import parse_size
from strata.errors import ConfigError
from strata.hardware.files import parse_cpu_list
from strata.hardware.numa import HugePages, MemoryNode
from strata.hardware.pci import LANE_BYTES, WIDTHS, Link
from strata.hardware.profile import MAX_RATE, DeviceProfile, HardwareProfile, Processor, Rate, Source

PROFILES = Path(__file__).parent / "profiles"
_EXAMPLE = f"see those in {PROFILES}"
_SPEED = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([A-Za-z]+)/s", re.ASCII)
_UNITS = {
    "bytes": {"MB": 1e6, "GB": 1e9, "TB": 1e12},
    "macs": {"GMAC": 1e9, "TMAC": 1e12},
}
_ISAS = ("avx2", "avx512")
_MAX_NODES = 64
_MAX_BYTES = 1 << 50


def profile_names() -> list[str]:
    """Names of the profiles that come with Strata."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(asked: str) -> HardwareProfile:
    """A shipped profile by name, or a YAML file. Raises ConfigError naming file, line and key."""
    shipped = PROFILES / f"{asked}.yaml"
    path = shipped if asked in profile_names() else Path(asked)
    if path is not shipped and not path.exists():
        raise ConfigError(
            f"--hardware {asked}: no such file, and no profile of that name",
            remedy=nearest(asked, profile_names()),
        )
    root = compose(read_text(path), path)
    if root is None or is_null(root):
        raise ConfigError(f"{path}: the file is empty", remedy=_EXAMPLE)
    try:
        return _profile(_Section(root, path, "the file", ("name", "processor", "nodes", "device", "disk")))
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply", remedy=_EXAMPLE) from None


class _Section:
    """A mapping that is read key by key; an unknown key is an error at once."""

    def __init__(self, node: yaml.Node, file: Path, name: str, known: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{place_of(file, node)}: {name} holds a {noun(node)}, not keys", remedy=_EXAMPLE
            )
        self.name, self.file, self.node = name, file, node
        self.values: dict[str, yaml.Node] = {}
        for key, value, place in entries(node, file, name):
            if key not in known:
                raise ConfigError(f"{place}: unknown key {key!r} in {name}", remedy=nearest(key, known))
            self.values[key] = value

    def has(self, key: str) -> bool:
        return key in self.values

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(
            f"{place_of(self.file, self.values.get(key, self.node))}: {self.name}.{key} {problem}",
            remedy=_EXAMPLE,
        )

    def value(self, key: str) -> yaml.Node:
        if key not in self.values:
            raise ConfigError(f"{place_of(self.file, self.node)}: {self.name} has no {key}", remedy=_EXAMPLE)
        return self.values[key]

    def text(self, key: str) -> str:
        node = self.value(key)
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip() or len(node.value) > 200:
            raise self.fail(key, "is not a single value of 1 to 200 characters")
        return str(node.value).strip()

    def word(self, key: str, words: tuple[str, ...]) -> str:
        text = self.text(key)
        if text not in words:
            raise self.fail(key, f"is {text!r}, not one of: {', '.join(words)}")
        return text

    def number(self, key: str, low: int, high: int) -> int:
        text = self.text(key)
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
            raise self.fail(key, f"is {text[:40]!r}, not a whole number from {low} to {high}")
        return int(text)

    def size(self, key: str) -> int:
        try:
            size = parse_size(self.text(key))
        except ValueError as error:
            raise self.fail(key, f"{self.text(key)!r} {error}") from None
        if not 0 < size <= _MAX_BYTES:
            raise self.fail(key, f"is {size} bytes, allowed: 1 to {_MAX_BYTES}")
        return size

    def cpus(self, key: str) -> tuple[int, ...]:
        try:
            found = tuple(parse_cpu_list(self.text(key)))
        except ConfigError as error:
            raise self.fail(key, f"is no CPU list: {error.cause}") from None
        return found

    def section(self, key: str, known: tuple[str, ...]) -> _Section:
        return _Section(self.value(key), self.file, key, known)

    def sections(self, key: str, known: tuple[str, ...]) -> list[_Section]:
        node = self.value(key)
        if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= _MAX_NODES:
            raise self.fail(key, f"is not a list of 1 to {_MAX_NODES} entries")
        return [_Section(item, self.file, f"{key}[{i}]", known) for i, item in enumerate(node.value)]

    def rate(self, key: str, kind: str) -> Rate:
        part = self.section(key, ("value", "source"))
        text, units = part.text("value"), _UNITS[kind]
        found = _SPEED.fullmatch(text)
        if found is None or found[2] not in units or float(found[1]) <= 0:
            raise part.fail("value", f"is {text!r}, not a speed in {' or '.join(f'{u}/s' for u in units)}")
        value = float(found[1]) * units[found[2]]
        if value > MAX_RATE:
            unit, most = next(reversed(units.items()))
            raise part.fail("value", f"is {text!r}, allowed: up to {MAX_RATE / most:g} {unit}/s")
        source: Source = part.word("source", get_args(Source))  # type: ignore[assignment]
        return Rate(value, source)


def _profile(part: _Section) -> HardwareProfile:
    processor = part.section("processor", ("name", "isa", "core_macs"))
    keys = ("cpus", "cores", "memory", "read", "distances", "huge_pages")
    nodes = part.sections("nodes", keys)
    found = tuple(_node(node, index, len(nodes)) for index, node in enumerate(nodes))
    _check_cpus(part, found)
    profile = HardwareProfile(
        name=part.text("name"),
        processor=Processor(
            processor.text("name"), processor.word("isa", _ISAS), processor.rate("core_macs", "macs")
        ),
        nodes=found,
        node_read=tuple(node.rate("read", "bytes") for node in nodes),
        available=sum(node.memory for node in found),
        device=_device(part, len(nodes)) if part.has("device") else None,
    )
    if not part.has("disk"):
        return profile
    disk = part.section("disk", ("read",)).rate("read", "bytes")
    return dataclasses.replace(profile, disk_read=disk)


def _node(part: _Section, index: int, count: int) -> MemoryNode:
    cpus, memory = part.cpus("cpus"), part.size("memory")
    cores = part.cpus("cores") if part.has("cores") else cpus
    if not set(cores) <= set(cpus):
        raise part.fail("cores", "names CPUs that are not among the node's cpus")
    distances: tuple[int, ...] = ()
    if part.has("distances"):
        words = part.text("distances").split()
        distances = tuple(
            int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 4
        )
        if len(words) != count or len(distances) != count:
            raise part.fail("distances", f"is not {count} numbers, one for each node")
    pages = part.sections("huge_pages", ("size", "count")) if part.has("huge_pages") else []
    reserved = ((pool.size("size"), pool.number("count", 1, 1 << 27)) for pool in pages)
    pools = tuple(HugePages(size, number, number) for size, number in reserved)
    return MemoryNode(index, cpus, cores, memory, memory, distances, pools)


def _check_cpus(part: _Section, nodes: tuple[MemoryNode, ...]) -> None:
    """No CPU is in two nodes, and there is at least one."""
    cpus = [cpu for node in nodes for cpu in node.cpus]
    if not cpus or len(cpus) != len(set(cpus)):
        raise part.fail("nodes", "have no CPU at all, or one CPU twice")


def _device(part: _Section, nodes: int) -> DeviceProfile:
    keys = ("name", "memory", "node", "link", "read", "macs", "to_device", "to_host")
    device = part.section("device", keys)
    link = device.section("link", ("generation", "width"))
    generation, width = link.number("generation", 1, max(LANE_BYTES)), link.number("width", 1, 32)
    if width not in WIDTHS:
        raise link.fail("width", f"is {width}, not one of: {', '.join(map(str, WIDTHS))}")
    return DeviceProfile(
        name=device.text("name"),
        memory=device.size("memory"),
        node=device.number("node", 0, nodes - 1),
        link=Link(generation, width),
        read=device.rate("read", "bytes"),
        macs=device.rate("macs", "macs"),
        to_device=device.rate("to_device", "bytes"),
        to_host=device.rate("to_host", "bytes"),
    )
