"""What a graphics card needs beside itself: every gap is named with its remedy. Nothing here met a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import machines
import pytest
from fake_nvml import GIB, FakeNvml

from strata.errors import HardwareError
from strata.hardware.gpu_stack import CUPY, INSTALL, NVRTC, GpuStack, gpu_stack
from strata.hardware.nvml import driver_facts, link_generation
from strata.hardware.probe import card_profile, probe

VERSIONS = {CUPY: "13.6.0", NVRTC: "12.6.85"}


def stack(root: Path, library: Any, **versions: str) -> GpuStack:
    return gpu_stack(root, library, lambda package: {**VERSIONS, **versions}.get(package, ""))


def test_a_whole_stack(tmp_path: Path) -> None:
    fake = FakeNvml()
    found = stack(machines.dual_xeon(tmp_path), fake)
    assert found.usable and found.driver == "550.54.14" and fake.open == 0
    found.require()
    (card,) = found.cards
    assert (card.name, card.compute, card.memory, card.free) == (fake.name, (8, 6), 24 * GIB, 23 * GIB)
    assert (card.generation, card.width, card.now_generation, card.now_width) == (4, 16, 1, 16)
    assert (card.bus_bits, card.cores, card.memory_hz) == (384, 10496, 9751e6)
    assert found.to_json()["cards"][0]["pci"] == "00000000:82:00.0"


def test_a_machine_without_a_card(tmp_path: Path) -> None:
    found = stack(machines.epyc_single(tmp_path), None)
    assert [one.what for one in found.missing] == ["there is no NVIDIA card on the PCI bus"]
    with pytest.raises(HardwareError, match=r"(?s)no NVIDIA card.*remedy: .*compute capability 8\.0"):
        found.require()


def test_all_gaps_are_named_and_the_first_is_mended_first(tmp_path: Path) -> None:
    root = machines.dual_xeon(tmp_path)
    found = gpu_stack(root, None, lambda package: "")
    assert [one.remedy for one in found.missing][1:] == [INSTALL, INSTALL]
    with pytest.raises(HardwareError, match=r"(?s)82:00\.0 has no driver; cupy.*; nvidia.*apt install"):
        found.require()


@pytest.mark.parametrize(
    ("changes", "versions", "what", "remedy"),
    [
        ({"driver": "470.82.01"}, {}, "the driver is 470.82.01, 525 is the oldest", "apt install"),
        ({"count": 0}, {}, "the driver shows no card", "reboot"),
        ({"init_status": 9}, {}, r"does not answer \(NVML error 9\)", "reboot"),
        ({"compute": (7, 5)}, {}, "compute capability 7.5", "device.use"),
        ({"compute": (12, 0)}, {}, "compute capability 12.0", "device.use"),
        ({}, {CUPY: ""}, "cupy-cuda12x is not installed", "pip install"),
        ({}, {NVRTC: "13.0.48"}, "is 13.0.48, which is not 12.x", "pip install"),
    ],
)
def test_one_gap(
    tmp_path: Path, changes: dict[str, Any], versions: dict[str, str], what: str, remedy: str
) -> None:
    root = machines.write(machines.dual_xeon(tmp_path), {"sys/module/nvidia/version": "550.54.14"})
    fake = FakeNvml()
    for name, value in changes.items():
        setattr(fake, name, value)
    found = stack(root, fake, **versions)
    assert len(found.missing) == 1
    with pytest.raises(HardwareError, match=rf"(?s){what}.*remedy: .*{remedy}"):
        found.require()


def test_a_container_without_the_drivers_libraries(tmp_path: Path) -> None:
    root = machines.write(machines.dual_xeon(tmp_path), {"sys/module/nvidia/version": "550.54.14"})
    found = stack(root, None)
    assert found.driver == "550.54.14" and found.missing[0].remedy.endswith("--gpus all")


def test_what_a_card_does_not_tell_is_zero() -> None:
    fake = FakeNvml()
    fake.numbers = dict.fromkeys(fake.numbers)
    facts = driver_facts(fake)
    assert facts is not None and (facts.cards[0].generation, facts.cards[0].cores) == (0, 0)


def test_the_link_under_load() -> None:
    fake = FakeNvml()
    assert link_generation(fake) == 1
    fake.numbers["nvmlDeviceGetCurrPcieLinkGeneration"] = 3
    assert link_generation(fake) == 3 and link_generation(fake, 1) == 0 and fake.open == 0


def test_a_card_without_a_datasheet_gets_assumed_rates(tmp_path: Path) -> None:
    facts = driver_facts(FakeNvml())
    assert facts is not None
    machine = probe("Xeon", "avx2", machines.epyc_single(tmp_path), range(32))
    profile = card_profile(facts.cards[0], machine)
    assert profile.read.value == pytest.approx(936e9, rel=1e-3) and profile.read.source == "assumed"
    assert profile.memory == 24 * GIB and profile.link is not None and profile.link.generation == 4
