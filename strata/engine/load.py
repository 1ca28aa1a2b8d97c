"""From a store on disk and a plan to an engine that is ready: what `strata run` and the server call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from strata.backends.base import Activations, Backend, KvSpec
from strata.core import PAGE_TOKENS, KvDtype
from strata.device.base import Device
from strata.engine.device_run import DeviceRun
from strata.engine.engine import Engine, EngineOptions
from strata.engine.placement import NumaSystem, place
from strata.engine.speculative.make import SpeculationOptions, make_speculator
from strata.engine.tier import keep_heat, load_heat, open_tier
from strata.errors import ConfigError
from strata.hardware.cpu import CpuChoice
from strata.hardware.profile import HardwareProfile
from strata.memory.heat import Heat
from strata.memory.kv_tiers import SPARE
from strata.model.decoder import Decoder
from strata.model.footprint import contents_of_store, footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.plan.planner import make_plan
from strata.plan.spec import ModelSpec
from strata.store.manifest import read_manifest
from strata.store.reader import Store

KV_RESERVE = 1 / 16
"""Share of the device's KV pages that stay free while idle ones can leave: so much room a new prompt finds
without waiting for copies. Assumed, not measured."""
BackendName = Literal["cpu", "reference"]
_DEFAULTS = PlanOptions()


def plan_store(
    store_path: str | Path,
    machine: HardwareProfile,
    options: PlanOptions = _DEFAULTS,
    *,
    kv_dtype: KvDtype = "int8",
    page_tokens: int = PAGE_TOKENS,
) -> Plan:
    """What running a store on a machine takes. Raises StoreError and what `make_plan` raises."""
    contents = contents_of_store(read_manifest(Path(store_path)))
    kv = KvSpec.of(contents.spec, page_tokens, kv_dtype)
    return make_plan(footprint(contents, kv), machine, options)


def load_engine(
    store_path: str | Path,
    plan: Plan,
    *,
    backend: BackendName = "cpu",
    activations: Activations = "int8",
    valid_tokens: int | None = None,
    share_prefixes: bool = True,
    wrap: Callable[[Backend], Backend] | None = None,
    device: DeviceRun | None = None,
    numa: NumaSystem | None = None,
    speculation: SpeculationOptions | None = None,
) -> Engine:
    """Open a store and put an engine over it; weights are read from disk when first needed.

    plan: made for this store and this machine (`plan_store`); context, KV pages, threads and chunk are its.
    Where it leaves experts on the disk, memory becomes a cache of them; else all are mapped.
    valid_tokens: ids of the tokenizer; None = all rows of the vocabulary. share_prefixes: see EngineOptions.
    wrap: puts something before the backend, such as a clock. device: computes before the backend, which then
    has the experts that are not worth bringing there; None: the backend computes all. numa: instead of this
    machine's calls. speculation: steps may verify drafts; None: a step is a token.
    Raises StoreError, HardwareError (no usable processor or device), CapacityError (no room for an expert).
    """
    store = Store.open(store_path)
    spec = store.spec
    options = _engine_options(plan, spec, valid_tokens, share_prefixes)
    loaded = load_heat(store)
    heat = loaded.heat
    placement = place(plan, store, numa, slices=backend == "cpu", heat=heat)
    made = cpu = make_backend(backend, plan, activations)
    if device is not None:
        reserve = int(plan.kv.pages * KV_RESERVE)
        options = replace(options, host_pages=_pool_pages(plan), reserve_pages=reserve)
        made = _hybrid(made, store, plan, device, options, heat)
    tier = None
    if plan.host.disk_bytes and backend == "cpu":
        # With a device it is the device's expert cache that sees all uses.
        tier = open_tier(store, plan.host.in_memory, heat, learns=device is None)
    decoder = Decoder(spec, store, wrap(made) if wrap else made, tier, placement.experts)
    engine = Engine(decoder, options)
    engine.placement = placement
    # A device's pages are at its node, those that all threads read are spread.
    placement.know("KV pages", engine.kv_memory, plan.nodes[:1] if device is not None else plan.nodes)
    placement.watch(engine.observers)
    keep_heat(engine, heat, store)
    engine.heat_fault = "" if loaded.missing else loaded.reason
    if speculation is not None:
        contents = contents_of_store(store.manifest)
        own, known = footprint(contents, engine.kv), options.valid_tokens
        engine.speculator = make_speculator(speculation, own, plan, cpu, known, decoder, _clock(made))
        # What shares a beginning needs the hidden state of its last token, to which another one is joined.
        engine.pages.overlap = int(decoder.keeps_hidden)
    return engine


def _engine_options(
    plan: Plan, spec: ModelSpec, valid_tokens: int | None, share_prefixes: bool
) -> EngineOptions:
    return EngineOptions(
        context=plan.kv.context,
        pages=plan.kv.pages,
        valid_tokens=spec.vocab if valid_tokens is None else min(valid_tokens, spec.vocab),
        page_tokens=plan.kv.page_tokens,
        kv_dtype=plan.kv.dtype,
        chunk=plan.chunk,
        max_running=plan.running,
        decode_seconds=1.0 / plan.predictions[0].tokens_per_second,
        token_seconds=1.0 / plan.predictions[-1].tokens_per_second,
        share_prefixes=share_prefixes,
    )


def _clock(backend: Backend) -> Callable[[], float]:
    """Of an engine's steps, in seconds: an emulated device's time is its own."""
    device: Device | None = getattr(backend, "device", None)
    return time.perf_counter if device is None else device.now


def _pool_pages(plan: Plan) -> int:
    """Host pages beside a device: as many as it has, as far as half of what the plan leaves free goes.

    What is kept there need not be computed again when a prompt begins like it; nobody waits for more. None
    where all pages live at the host.
    """
    if plan.kv.tier == "host":
        return 0
    free = sum(part.nbytes for part in plan.host.parts if part.name == "free")
    pages = min(plan.kv.pages, free // 2 // max(1, plan.kv.nbytes // plan.kv.pages))
    return pages if pages > SPARE else 0


def _hybrid(
    made: Backend,
    store: Store,
    plan: Plan,
    device: DeviceRun,
    options: EngineOptions,
    heat: Heat,
) -> Backend:
    """The backend with a device before it."""
    from strata.backends.cpu import CpuBackend
    from strata.engine.hybrid_load import device_backend

    if not isinstance(made, CpuBackend):
        raise ConfigError(
            f"device.use is {device.use} and backend.name is {made.name}",
            remedy="use the cpu backend beside it",
        )
    return device_backend(made, store.spec, store, plan, device, options, heat)


def make_backend(name: BackendName, plan: Plan, activations: Activations) -> Backend:
    """The backend of that name on the plan's CPUs. Only the reference imports torch, which takes seconds."""
    for text in plan.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if name == "reference":
        from strata.backends.reference import ReferenceBackend

        return ReferenceBackend(threads=len(plan.cpus))
    from strata.backends.cpu import CpuBackend

    chosen = CpuChoice(plan.cpus, plan.bind, teams=plan.teams, nodes=plan.nodes)
    return CpuBackend(activations=activations, chosen=chosen)
