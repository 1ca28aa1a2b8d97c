"""A profile's device as the emulated device and the simulator see it."""

from __future__ import annotations

import dataclasses

import pytest
from models import machine

from strata.device.emulated import EmulatedDevice
from strata.errors import HardwareError
from strata.hardware.profile_file import load_profile, profile_names
from strata.plan.device import DRIVER_BYTES
from strata.plan.figures import device_figures
from strata.plan.speeds import speeds_of


@pytest.mark.parametrize("name", profile_names())
def test_the_emulated_device_is_as_fast_as_the_plan_thinks(name: str) -> None:
    profile = load_profile(name)
    figures, speeds = device_figures(profile), speeds_of(profile, {0: 1}, "interleave")
    assert figures.memory_bytes_per_s == speeds.device_read and figures.macs_per_s == speeds.device_macs
    assert (figures.h2d.bytes_per_s, figures.d2h.bytes_per_s) == (speeds.to_device, speeds.to_host)
    assert profile.device is not None
    device = EmulatedDevice(figures, with_data=False)
    assert device.free_bytes() == profile.device.memory - DRIVER_BYTES


def test_the_card_copies_from_the_node_it_hangs_from() -> None:
    two = machine(2, read=100e9)
    slow = dataclasses.replace(
        two, node_read=(two.node_read[0], dataclasses.replace(two.node_read[1], value=1e9))
    )
    assert slow.device is not None
    far = dataclasses.replace(slow, device=dataclasses.replace(slow.device, node=1))
    assert device_figures(far).host_copy_bytes_per_s < device_figures(slow).host_copy_bytes_per_s


def test_a_machine_without_a_card() -> None:
    with pytest.raises(HardwareError, match="machine has no graphics card"):
        device_figures(machine(device_gib=None))
