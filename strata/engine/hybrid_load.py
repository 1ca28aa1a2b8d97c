"""A hybrid backend as a plan says: slots, who computes missed experts, how large a step may be."""

from __future__ import annotations

import math

from strata.backends.base import KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.options import HybridOptions
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import EngineOptions
from strata.errors import CapacityError
from strata.hardware.profile import HardwareProfile
from strata.memory.policies import POLICIES
from strata.model.footprint import contents_of_store, footprint
from strata.plan.cost import Placement, Speeds, Step, layer_cost, speeds_of, usage
from strata.plan.device import STREAM_EXPERTS
from strata.plan.figures import device_figures
from strata.plan.footprint import Footprint
from strata.plan.plan import DevicePlan, Plan
from strata.plan.routing import UNIFORM
from strata.plan.spec import ModelSpec
from strata.store.reader import Store


def emulated_backend(
    cpu: CpuBackend,
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    machine: HardwareProfile,
    engine: EngineOptions,
) -> HybridBackend:
    """Over an emulated device with the figures of `machine`'s: right results, and virtual time.

    CapacityError when the plan leaves the device idle.
    """
    if plan.device is None:
        raise CapacityError(
            f"the plan for {plan.model} on {plan.machine} leaves the device idle",
            remedy="choose a smaller model.context, or device.use: none",
        )
    speeds = speeds_of(machine, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    options = _options(spec, store, plan, plan.device, speeds, engine)
    return HybridBackend(EmulatedDevice(device_figures(machine)), HostKernels(cpu), cpu, spec, options)


def stream_buffers(model: Footprint, speeds: Speeds, plan: Plan) -> int:
    """Buffers of STREAM_EXPERTS experts that keep the bus busy while a prompt's chunk goes through attention.

    Two at least, a layer's experts at most. What crosses meanwhile has to lie somewhere: see HybridOptions.
    """
    if plan.device is None or not model.moe_layers:
        return 2
    place = Placement(True, plan.device.slots, plan.kv.tier == "device", plan.host.in_memory, plan.misses)
    step = Step.prefill(plan.chunk, plan.kv.context // 2)
    before = layer_cost(model, speeds, place, step, usage(model, place, step, UNIFORM)).base
    crossing = before * speeds.to_device / model.expert_bytes
    most = -(-model.experts // STREAM_EXPERTS)
    return max(2, min(most, 1 + math.ceil(crossing / STREAM_EXPERTS)))


def _options(
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    device: DevicePlan,
    speeds: Speeds,
    engine: EngineOptions,
) -> HybridOptions:
    kv = KvSpec.of(spec, engine.page_tokens, engine.kv_dtype)
    model = footprint(contents_of_store(store.manifest), kv)
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    return HybridOptions(
        slots=device.slots if records else 0,
        slot_bytes=max(records, default=1),
        speeds=speeds,
        misses=plan.misses,
        rows=engine.chunk + engine.max_running,
        logit_rows=engine.max_running,
        blocks=engine.max_running * -(-engine.context // engine.page_tokens),
        stream_buffers=stream_buffers(model, speeds, plan),
        stream_experts=STREAM_EXPERTS,
        kv_tier=plan.kv.tier,
        staged_blocks=plan.kv.pages if plan.kv.tier == "host" else 0,
        pinned=False,
        policy=POLICIES["forecast"],
        simulated=speeds,
    )
