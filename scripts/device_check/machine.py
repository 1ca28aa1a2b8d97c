"""The device and the kernels that stages measure: a card's, or the emulated ones."""

from __future__ import annotations

from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.cuda.kernels import EmulatedLoader, GpuLoader
from strata.device.base import Device
from strata.device.emulated import EmulatedDevice
from strata.hardware.profile import HardwareProfile
from strata.hardware.profile_file import load_profile
from strata.interfaces.hardware import remembered_machine, with_device
from strata.plan.figures import device_figures

EMULATED = "rtx3090-2x-e5-2680v4"


def open_device(emulated: bool) -> tuple[Device, CudaKernels]:
    """A new one; the caller closes it."""
    if emulated:
        return EmulatedDevice(device_figures(load_profile(EMULATED))), CudaKernels(EmulatedLoader())
    from strata.device.cuda import CudaDevice

    device = CudaDevice()
    return device, CudaKernels(GpuLoader(device.arch))


def machine(emulated: bool) -> HardwareProfile:
    """This machine with the device that `open_device` opens."""
    from strata.config import Override, load_config

    use = "emulated" if emulated else "cuda"
    return with_device(remembered_machine(), load_config(None, [Override.parse(f"device.use={use}")]))
