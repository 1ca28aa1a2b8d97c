"""A hybrid backend as a plan says: slots, who computes missed experts, how large a step may be."""

from __future__ import annotations

from dataclasses import replace

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.options import HybridOptions
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import EngineOptions
from strata.errors import CapacityError
from strata.hardware.profile import HardwareProfile
from strata.memory.heat import Heat
from strata.memory.policies import POLICIES
from strata.plan.cost import Speeds, speeds_of
from strata.plan.figures import device_figures
from strata.plan.plan import DevicePlan, Plan
from strata.plan.spec import ModelSpec
from strata.store.reader import Store


def emulated_backend(
    cpu: CpuBackend,
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    machine: HardwareProfile,
    engine: EngineOptions,
    heat: Heat | None = None,
) -> HybridBackend:
    """Over an emulated device with the figures of `machine`'s: right results, and virtual time.

    heat: what earlier runs used; it learns what this one decodes.

    CapacityError when the plan leaves the device idle.
    """
    if plan.device is None:
        raise CapacityError(
            f"the plan for {plan.model} on {plan.machine} leaves the device idle",
            remedy="choose a smaller model.context, or device.use: none",
        )
    speeds = speeds_of(machine, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    options = replace(_options(spec, store, plan, plan.device, speeds, engine), heat=heat)
    return HybridBackend(EmulatedDevice(device_figures(machine)), HostKernels(cpu), cpu, spec, options)


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
        simulated=speeds,
    )
