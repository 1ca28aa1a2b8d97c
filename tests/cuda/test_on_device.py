"""The cases of every kernel through the device layer: on a GPU (marker gpu), some on the emulated one."""

from __future__ import annotations

import shutil
from functools import cache

import pytest
from cases import Case
from device_figures import ROUND
from device_runner import DeviceRunner
from runners import source_of
from test_kernels import ALL

from strata.backends.cuda.kernels import EmulatedLoader, GpuLoader
from strata.device.emulated import EmulatedDevice
from strata.hardware.gpu_stack import gpu_stack

FEW = {case.file: case for case in ALL}  # one of each file


@cache
def gpu_runner() -> DeviceRunner:
    """One context for all cases."""
    from strata.device.cuda import CudaDevice

    device = CudaDevice()
    return DeviceRunner(device, GpuLoader(device.arch, source_of))


@cache
def emulated_loader() -> EmulatedLoader:
    return EmulatedLoader(checked=False, source=source_of)


# No parameters where there is no card: that is one skipped test, not a thousand.
@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL if gpu_stack().usable else [], ids=str)
def test_on_a_gpu(case: Case) -> None:
    prepared = case.make()
    gpu_runner().run(prepared.call)
    prepared.check()


@pytest.mark.parametrize("case", FEW.values(), ids=str)
def test_on_the_emulated_device(case: Case) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    device, prepared = EmulatedDevice(ROUND, seed=1), case.make()
    DeviceRunner(device, emulated_loader()).run(prepared.call)
    prepared.check()
    device.close()
