"""Hardware profiles from YAML: the shipped ones, and every mistake with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata.hardware.numa import HugePages
from strata.hardware.profile import HardwareProfile, Rate
from strata.hardware.profile_file import PROFILES, load_profile, profile_names

SMALL = """name: small
processor: {name: P, isa: avx2, core_macs: {value: 50 GMAC/s, source: assumed}}
nodes:
  - cpus: 0-3
    memory: 8GiB
    read: {value: 20 GB/s, source: measured}
"""


def load(tmp_path: Path, text: str) -> HardwareProfile:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    return load_profile(str(file))


def test_the_target_machine() -> None:
    found = load_profile("rtx3090-2x-e5-2680v4")
    assert sum(rate.value for rate in found.node_read) == 110e9  # field report A
    assert found.device is not None and found.device.to_device == Rate(12e9, "field")
    assert [len(node.cores) for node in found.nodes] == [14, 14]
    assert len(found.allowed_cpus) == 56 and found.memory == 256 << 30
    assert found.device.link is not None and found.device.link.describe() == "PCIe 3.0 x16"


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_sane_and_say_their_sources(name: str) -> None:
    found = load_profile(name)
    assert found.device is not None and found.device.memory == 24 << 30
    assert found.device.link is not None
    assert found.device.to_device.value < found.device.link.bandwidth
    assert not any(rate.source == "measured" for rate in found.node_read), "nothing was measured by us"


@pytest.mark.parametrize("name", profile_names())
def test_assumed_figures_say_so_in_a_comment(name: str) -> None:
    comment, assumed = "", 0
    for line in (PROFILES / f"{name}.yaml").read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment = line if "ssumed" not in comment else comment + line
        elif "source: assumed" in line:
            assumed += 1
            assert "ssumed" in comment, line
        elif "source:" in line:
            comment = ""
    assert assumed


def test_the_three_profiles_of_the_plan() -> None:
    assert profile_names() == ["rtx3090-2x-e5-2680v4", "rtx3090-epyc-7302", "rtx4090-ddr5"]


def test_what_may_be_left_out(tmp_path: Path) -> None:
    found = load(tmp_path, SMALL)
    assert found.device is None and found.disk_read.source == "assumed"
    assert found.nodes[0].cores == found.nodes[0].cpus == (0, 1, 2, 3)
    assert found.processor.core_macs == Rate(50e9, "assumed")


def test_huge_pages_and_a_disk(tmp_path: Path) -> None:
    pages = "    huge_pages: [{size: 1GiB, count: 4}]\ndisk: {read: {value: 3.5 GB/s, source: datasheet}}\n"
    found = load(tmp_path, SMALL + pages)
    assert found.nodes[0].huge_pages == (HugePages(1 << 30, 4, 4),)
    assert found.disk_read == Rate(3.5e9, "datasheet")


BAD = {
    "empty": ("", "the file is empty"),
    "list": ("- a\n", "p.yaml:1:1: the file holds a list"),
    "unknown key": (SMALL + "gpu: {}\n", ":7:1: unknown key 'gpu' in the file"),
    "nearest": (SMALL.replace("memory:", "memry:"), "did you mean 'memory'?"),
    "missing": (SMALL.replace("name: small\n", ""), "the file has no name"),
    "no nodes": (SMALL.partition("nodes:")[0] + "nodes: []\n", "nodes is not a list of 1 to 64"),
    "no unit": (SMALL.replace("8GiB", "8"), ":5:13: nodes[0].memory '8' has no unit"),
    "zero memory": (SMALL.replace("8GiB", "0GiB"), "memory is 0 bytes"),
    "huge memory": (SMALL.replace("8GiB", "9999TiB"), "memory is"),
    "no speed": (
        SMALL.replace("20 GB/s", "fast"),
        "read.value is 'fast', not a speed in MB/s or GB/s or TB/s",
    ),
    "wrong unit": (SMALL.replace("20 GB/s", "20 GMAC/s"), "not a speed in MB/s"),
    "zero speed": (SMALL.replace("20 GB/s", "0 GB/s"), "read.value is '0 GB/s'"),
    "endless speed": (SMALL.replace("20 GB/s", "1000001 TB/s"), "'1000001 TB/s', allowed: up to 1e+06 TB/s"),
    "no source": (SMALL.replace(", source: measured", ""), "read has no source"),
    "odd source": (SMALL.replace("measured", "guessed"), "read.source is 'guessed', not one of: measured"),
    "isa": (SMALL.replace("avx2", "neon"), "processor.isa is 'neon', not one of: avx2, avx512"),
    "cpus": (SMALL.replace("0-3", "3-0"), "nodes[0].cpus is no CPU list"),
    "cores": (SMALL.replace("cpus: 0-3", "cpus: 0-3\n    cores: 2-4"), "names CPUs that are not among"),
    "distances": (SMALL.replace("cpus: 0-3", "cpus: 0-3\n    distances: 10 21"), "is not 1 numbers"),
    "twice": (SMALL + SMALL.partition("nodes:\n")[2], "one CPU twice"),
    "duplicate": (SMALL + "name: b\n", "'name' stands twice"),
    "alias loop": (SMALL.replace("small", "&a [*a]"), "name is not a single value"),
    "syntax": ("name: [\n", "not valid YAML"),
}


@pytest.mark.parametrize(("text", "cause"), BAD.values(), ids=BAD.keys())
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert cause in str(caught.value) and "p.yaml" in caught.value.cause


DEVICE = """device:
  name: G
  memory: 8GiB
  node: 0
  link: {generation: 3, width: 16}
  read: {value: 1 TB/s, source: datasheet}
  macs: {value: 1 TMAC/s, source: datasheet}
  to_device: {value: 12 GB/s, source: field}
  to_host: {value: 12 GB/s, source: field}
"""


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("node: 0", "node: 1", "device.node is '1', not a whole number from 0 to 0"),
        ("generation: 3", "generation: 9", "link.generation is '9'"),
        ("width: 16", "width: 5", "link.width is 5, not one of: 1, 2, 4, 8, 12, 16, 32"),
    ],
)
def test_devices_that_cannot_be(tmp_path: Path, old: str, new: str, cause: str) -> None:
    assert load(tmp_path, SMALL + DEVICE).device is not None
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, SMALL + DEVICE.replace(old, new))
    assert cause in str(caught.value)


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rtx4090-ddr5'"):
        load_profile("rtx4090")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_profile(str(tmp_path))


@given(st.text(max_size=60))
def test_any_text_is_a_profile_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(SMALL.replace("20 GB/s", text), encoding="utf-8")
    try:
        assert load_profile(str(file)).nodes
    except ConfigError as error:
        assert "any.yaml" in error.cause
