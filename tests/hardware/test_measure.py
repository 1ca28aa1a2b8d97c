"""Measured speeds: into the profile, into a file per machine, and back, whatever became of the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.hardware.measure import Measurement, load, machine_key, measure_nodes, measured, save
from strata.hardware.probe import probe
from strata.hardware.profile import HardwareProfile, Rate

FOUND = Measurement({0: 50e9, 1: 60e9}, 70e9, 11e9, 12e9)


@pytest.fixture
def xeon(tmp_path: Path) -> HardwareProfile:
    return probe("Xeon", "avx2", machines.dual_xeon(tmp_path / "machine"))


def test_every_node_is_read_by_its_own_cores(xeon: HardwareProfile) -> None:
    asked: list[Sequence[int]] = []

    def read(cores: Sequence[int]) -> float:
        asked.append(cores)
        return 1e9 * len(asked)

    assert measure_nodes(xeon, read) == {0: 1e9, 1: 2e9}
    assert asked == [tuple(range(14)), tuple(range(14, 28))]


def test_nodes_that_cannot_be_measured_are_left_out(xeon: HardwareProfile) -> None:
    shut = replace(
        xeon, nodes=(replace(xeon.nodes[0], usable=False), replace(xeon.nodes[1], cores=(), cpus=()))
    )
    assert measure_nodes(shut, lambda cores: 1e9) == {}


def test_measured_speeds_replace_assumed_ones(xeon: HardwareProfile) -> None:
    found = measured(xeon, FOUND)
    assert found.node_read == (Rate(50e9, "measured"), Rate(60e9, "measured"))
    assert found.processor.core_macs == Rate(70e9, "measured")
    assert found.device is not None and found.device.to_device == Rate(11e9, "measured")
    assert found.device.read.source == "datasheet"
    partly = measured(xeon, Measurement({1: 60e9}, 70e9))
    assert partly.node_read[0] == xeon.node_read[0] and partly.device == xeon.device


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    for found in (FOUND, Measurement({0: 5e9}, 1e9)):
        assert save(tmp_path / "new" / "folder", "key", found)
        assert load(tmp_path / "new" / "folder", "key") == found
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["key.json"]


def test_a_folder_that_cannot_be_written_costs_nothing() -> None:
    assert not save(Path("/proc/nowhere"), "key", FOUND)
    assert load(Path("/proc/nowhere"), "key") is None


GOOD = {"node_read": {"0": 5e9}, "core_macs": 1e9, "to_device": None, "to_host": None}
BAD: list[Any] = [
    None,
    [],
    {},
    {**GOOD, "core_macs": 0},
    {**GOOD, "core_macs": "fast"},
    {**GOOD, "core_macs": True},
    {**GOOD, "core_macs": float("nan")},
    {**GOOD, "core_macs": float("inf")},
    {**GOOD, "node_read": {"0": -1}},
    {**GOOD, "node_read": {"zero": 5e9}},
    {**GOOD, "node_read": [5e9]},
    {**GOOD, "to_device": 1e30},
]


@pytest.mark.parametrize("data", BAD)
def test_values_that_cannot_be_are_measured_again(tmp_path: Path, data: Any) -> None:
    (tmp_path / "k.json").write_text(json.dumps(GOOD))
    assert load(tmp_path, "k") == Measurement({0: 5e9}, 1e9)
    (tmp_path / "k.json").write_text(json.dumps(data))
    assert load(tmp_path, "k") is None


@given(st.integers(0, 200), st.binary(max_size=20))
def test_damaged_files_are_measured_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    save(folder, "k", FOUND)
    data = (folder / "k.json").read_bytes()
    (folder / "k.json").write_bytes(data[: min(cut, len(data) - 1)] + noise)
    found = load(folder, "k")
    assert found is None or found == FOUND or found.core_macs > 0


def test_deep_nesting_is_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "k.json").write_text("[" * 60000)
    assert load(tmp_path, "k") is None


def test_the_key_tells_machines_and_containers_apart(tmp_path: Path) -> None:
    host = machines.dual_xeon(tmp_path / "host")
    keys = {machine_key(probe("Xeon", isa, host), host) for isa in ("avx2", "avx512")}
    keys.add(machine_key(probe("EPYC", "avx2", host), host))
    keys.add(machine_key(probe("Xeon", "avx2", host, allowed=[0, 1]), host))
    boxed = machines.v2_nested(machines.dual_xeon(tmp_path / "boxed"))
    keys.add(machine_key(probe("Xeon", "avx2", boxed), boxed))
    other = machines.write(machines.dual_xeon(tmp_path / "other"), {"etc/machine-id": "abc"})
    keys.add(machine_key(probe("Xeon", "avx2", other), other))
    assert len(keys) == 6
    assert machine_key(probe("Xeon", "avx2", host), host) in keys
