"""Which device a run computes on, and with which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.hardware.profile import HardwareProfile

DeviceUse = Literal["emulated", "cuda", "counted"]
KernelChoice = Literal["host", "cuda"]
DeviceActivations = Literal["bf16", "int8"]


@dataclass(frozen=True)
class DeviceRun:
    """machine: for which the plan was made; its device has the figures of the emulated one, and its speeds
    are what the split of missed experts begins with. use "counted": nothing is computed, calls are counted
    (`strata.device.counting`), which tells what a GPU would be asked. kernels: "cuda" are those of csrc/cuda,
    in the emulator where the device is emulated; "host" the CPU backend's over the emulated device's memory.
    activations: what the CUDA kernels multiply matrices in w8 with. page_lock: whether experts' memory is
    page-locked as it turns out to be needed. graphs: see HybridOptions.
    """

    machine: HardwareProfile
    use: DeviceUse = "emulated"
    kernels: KernelChoice = "host"
    activations: DeviceActivations = "bf16"
    page_lock: bool = True
    graphs: bool = False
