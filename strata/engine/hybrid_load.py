"""A hybrid backend as a plan says: slots, who computes missed experts, how large a step may be."""

from __future__ import annotations

from dataclasses import replace

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.kernel_set import KernelSet
from strata.backends.hybrid.options import HybridOptions
from strata.device.base import Device
from strata.device.emulated import EmulatedDevice
from strata.engine.device_run import DeviceRun
from strata.engine.engine import EngineOptions
from strata.errors import CapacityError
from strata.memory.heat import Heat
from strata.memory.policies import POLICIES
from strata.plan.cost import Speeds, speeds_of
from strata.plan.figures import device_figures
from strata.plan.plan import DevicePlan, Plan
from strata.plan.spec import ModelSpec
from strata.store.reader import Store


def device_backend(
    cpu: CpuBackend,
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    run: DeviceRun,
    engine: EngineOptions,
    heat: Heat | None = None,
) -> HybridBackend:
    """Over an emulated device (right results, and virtual time) or a GPU; above the device all is the same.

    heat: what earlier runs used; it learns what this one decodes.

    CapacityError when the plan leaves the device idle; HardwareError when there is no GPU, cupy or NVRTC, or
    for the emulator without g++.
    """
    if plan.device is None:
        raise CapacityError(
            f"the plan for {plan.model} on {plan.machine} leaves the device idle",
            remedy="choose a smaller model.context, or device.use: none",
        )
    speeds = speeds_of(run.machine, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    options = _options(spec, store, plan, plan.device, speeds, engine)
    # The emulated device's clock does not see the host work; a GPU's is the host's.
    options = replace(options, heat=heat, simulated=speeds if run.use == "emulated" else None)
    device, kernels = _open_device(run, cpu)
    return HybridBackend(device, kernels, cpu, spec, options)


def _open_device(run: DeviceRun, cpu: CpuBackend) -> tuple[Device, KernelSet]:
    """The one place where a GPU and an emulated device differ: who runs the launches."""
    if run.kernels == "host":
        return EmulatedDevice(device_figures(run.machine)), HostKernels(cpu)
    from strata.backends.cuda.kernel_set import CudaKernels
    from strata.backends.cuda.kernels import EmulatedLoader, GpuLoader

    if run.use == "emulated":
        return EmulatedDevice(device_figures(run.machine)), CudaKernels(EmulatedLoader())
    from strata.device.cuda import CudaDevice

    device = CudaDevice()
    return device, CudaKernels(GpuLoader(device.arch))


def _options(
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    device: DevicePlan,
    speeds: Speeds,
    engine: EngineOptions,
) -> HybridOptions:
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    return HybridOptions(
        slots=device.slots if records else 0,
        slot_bytes=max(records, default=1),
        speeds=speeds,
        misses=plan.misses,
        rows=engine.chunk + engine.max_running,
        logit_rows=engine.max_running,
        blocks=engine.max_running * -(-engine.context // engine.page_tokens),
        stream_buffers=device.stream.buffers,
        stream_experts=device.stream.experts,
        kv_tier=plan.kv.tier,
        staged_blocks=plan.kv.pages if plan.kv.tier == "host" else 0,
        pinned=False,
        policy=POLICIES["forecast"],
    )
