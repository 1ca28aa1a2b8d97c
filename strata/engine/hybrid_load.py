"""A hybrid backend as a plan says: slots, who computes missed experts, how large a step may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata.backends.base import KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.backends.hybrid.kernel_set import KernelSet
from strata.backends.hybrid.options import HybridOptions
from strata.core import Batch
from strata.device.base import Device
from strata.device.counting import CountingDevice
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_locks import PageLocks
from strata.device.figures import DeviceFigures
from strata.engine.device_run import DeviceRun
from strata.engine.dry_launch import MadeUpRoutes, NoLoader
from strata.engine.engine import EngineOptions
from strata.errors import CapacityError
from strata.memory.heat import Heat
from strata.memory.locked_pieces import LockOptions
from strata.memory.policies import POLICIES
from strata.model.decoder import Decoder
from strata.plan.figures import device_figures
from strata.plan.plan import DevicePlan, Plan
from strata.plan.spec import ModelSpec
from strata.plan.speeds import Speeds, speeds_of
from strata.store.reader import Store

LOCK_BYTES_PER_S = 2.5e9
"""Of page-locking pages of 4 KiB, what the field reports have; the emulated device's."""
COPIES_SHARE = 4
"""One part in so many of the host memory that a plan leaves free may become page-locked copies of experts;
half of it is the pool of KV pages."""
TRIAL_TOKENS = 32
"""Of a prompt that nobody asked: enough for kernels that take many tokens at once."""


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
    for the emulator without g++; UnsupportedError for a model that the kernels do not cover.
    """
    if plan.device is None:
        raise CapacityError(
            f"the plan for {plan.model} on {plan.machine} leaves the device idle",
            remedy="choose a smaller model.context, or device.use: none",
        )
    speeds = speeds_of(run.machine, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    options = _options(spec, store, plan, plan.device, speeds, engine, run)
    # The emulated device's clock does not see the host work; a GPU's is the host's.
    simulated = speeds if run.use == "emulated" else None
    options = replace(options, heat=heat, simulated=simulated, graphs=run.graphs)
    if run.kernels == "cuda":
        _require_kernels(cpu, spec, store, options, run, engine)
    device, kernels = _open_device(run, cpu, spec)
    return HybridBackend(device, kernels, cpu, spec, options)


def _require_kernels(
    cpu: CpuBackend,
    spec: ModelSpec,
    store: Store,
    options: HybridOptions,
    run: DeviceRun,
    engine: EngineOptions,
) -> None:
    """UnsupportedError before anything is computed, and not in the midst of an answer: a prompt and a token
    go through all launches on a device that computes nothing."""
    device, kernels = _open_device(replace(run, use="counted"), cpu, spec)
    backend = HybridBackend(device, kernels, cpu, spec, replace(options, heat=None))
    kv, rows = KvSpec.of(spec, engine.page_tokens, engine.kv_dtype), min(options.rows, TRIAL_TOKENS)
    pages = np.arange(-(-(rows + 1) // engine.page_tokens), dtype=np.int32)
    decoder, cache = Decoder(spec, store, backend), backend.kv_cache(kv, len(pages))
    for start, count in ((0, rows), (rows, 1)):
        positions = np.arange(start, start + count, dtype=np.int32)
        tokens, wanted = np.zeros(count, np.int32), np.array([count - 1], np.int32)
        decoder.forward(Batch.single(tokens, positions, pages, wanted), cache)


def _open_device(run: DeviceRun, cpu: CpuBackend, spec: ModelSpec) -> tuple[Device, KernelSet]:
    """The one place where a GPU and an emulated device differ: who runs the launches."""
    if run.kernels == "host":
        return _emulated(device_figures(run.machine)), HostKernels(cpu)
    from strata.backends.cuda.kernel_set import CudaKernels
    from strata.backends.cuda.kernels import EmulatedLoader, GpuLoader
    from strata.backends.cuda.prefill_shapes import PrefillChoice

    choice, figures = PrefillChoice(int8=run.activations == "int8"), device_figures(run.machine)
    if run.use == "counted":
        return CountingDevice(figures, MadeUpRoutes(spec)), CudaKernels(NoLoader(), choice)
    if run.use == "emulated":
        return _emulated(figures), CudaKernels(EmulatedLoader(), choice)
    from strata.device.cuda import CudaDevice

    device = CudaDevice()
    return device, CudaKernels(GpuLoader(device.arch), choice)


def _emulated(figures: DeviceFigures) -> EmulatedDevice:
    """Like most drivers for consumer cards: a mapped file is not locked where it lies."""
    return EmulatedDevice(figures, locks=PageLocks(read_only=False, bytes_per_s=LOCK_BYTES_PER_S))


def _options(
    spec: ModelSpec,
    store: Store,
    plan: Plan,
    device: DevicePlan,
    speeds: Speeds,
    engine: EngineOptions,
    run: DeviceRun,
) -> HybridOptions:
    """Of a plan."""
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    return HybridOptions(
        slots=device.slots if records else 0,
        slot_bytes=max(records, default=1),
        speeds=speeds,
        misses=plan.misses,
        rows=engine.chunk + engine.logit_rows,
        logit_rows=engine.logit_rows,
        blocks=engine.max_running * -(-engine.context // engine.page_tokens),
        stream_buffers=device.stream.buffers,
        stream_experts=device.stream.experts,
        kv_tier=plan.kv.tier,
        staged_blocks=plan.kv.pages if plan.kv.tier == "host" else 0,
        locks=_locks(plan, run),
        policy=POLICIES["forecast"],
    )


def _locks(plan: Plan, run: DeviceRun) -> LockOptions:
    """Experts are page-locked when they cross a second time; a part of the memory that the plan leaves free
    is for copies of those that cannot be locked where they lie (a file that is mapped read-only)."""
    if not run.page_lock:
        return LockOptions(after=None)
    free = sum(part.nbytes for part in plan.host.parts if part.name == "free")
    return LockOptions(after=1, copies=free // COPIES_SHARE)
