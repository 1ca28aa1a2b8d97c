"""The parts of a hybrid backend, made when its memory is cut: expert cache, flow of experts, KV pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from strata.backends.base import KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.device_ops import DeviceOps, PagedKv
from strata.backends.hybrid.expert_flow import ExpertFlow
from strata.backends.hybrid.expert_source import ExpertSource
from strata.backends.hybrid.expert_stream import ExpertStream
from strata.backends.hybrid.experts_host import HostShare
from strata.backends.hybrid.kv_blocks import DeviceKv
from strata.backends.hybrid.kv_stream import StreamedKv
from strata.backends.hybrid.memory import HybridMemory
from strata.backends.hybrid.options import HybridOptions
from strata.backends.hybrid.prefetch import Prefetcher
from strata.backends.hybrid.readback import Readback
from strata.backends.hybrid.slots import SlotLoader
from strata.backends.hybrid.split import Split
from strata.backends.hybrid.stream_buffers import StreamBuffers
from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.kv_border import SlotBorder
from strata.plan.spec import ModelSpec


class ExpertParts(NamedTuple):
    """What answers routed experts: reads the router's choice, brings or computes them, and guesses ahead."""

    readback: Readback
    flow: ExpertFlow
    prefetcher: Prefetcher


def make_cache(spec: ModelSpec, options: HybridOptions) -> ExpertCache:
    """The cache of all routed experts of the model; of a dense one it has no slots."""
    experts = spec.experts
    count = experts.router.experts if experts is not None else 0
    space = ExpertSpace(tuple(count if spec.is_moe(layer) else 0 for layer in range(spec.layers)))
    slots = options.slots if experts is not None else 0
    return ExpertCache(space, slots, options.policy, inserts_per_step=options.inserts_per_step)


def make_expert_parts(
    ops: DeviceOps,
    cpu: CpuBackend,
    spec: ModelSpec,
    options: HybridOptions,
    loader: SlotLoader,
    source: ExpertSource,
) -> ExpertParts:
    """Of a model with experts. ops: has its device and memory."""
    assert spec.experts is not None
    memory, hidden = ops.memory, spec.hidden
    place, top_k = (ops.device, memory.compute), spec.experts.router.top_k
    ring = options.slot_bytes, options.stream_buffers, options.stream_experts
    buffers = StreamBuffers(*place, memory.queue, source, memory.workspace, *ring)
    split = Split(options.misses, options.speeds)
    share = HostShare(ops.device, cpu, options.rows, hidden, options.simulated)
    readback = Readback(*place, options.rows, hidden, top_k)
    stream = ExpertStream(buffers, loader, split)
    flow = ExpertFlow(ops, loader, stream, share, split, options.heat)
    guesses = Readback(*place, options.rows, hidden, top_k)
    return ExpertParts(
        readback, flow, Prefetcher(ops, loader, guesses, options.prefetch, options.speeds.to_device)
    )


def make_kv(
    memory: HybridMemory,
    cache: ExpertCache,
    model: ModelSpec,
    spec: KvSpec,
    pages: int,
    staged_blocks: int,
    settle: Callable[[], None],
) -> PagedKv:
    """Expert slots lend their room to pages, but the experts of one token always have theirs.

    settle: makes slots evictable whose experts the device has done with.
    """
    if memory.kv_staging is not None:
        return StreamedKv(memory, spec, pages, memory.kv_staging, staged_blocks)
    region, experts = memory.region, model.experts
    if experts is None or not region.slots:
        return DeviceKv(memory, spec, pages, None)
    least = min(region.slots, experts.router.top_k)
    border = SlotBorder(region, cache, least, settle)
    return DeviceKv(memory, spec, region.sizes.pages_beside(least), border)
