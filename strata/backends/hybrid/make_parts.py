"""The parts of a hybrid backend, made when its memory is cut: expert cache, flow of experts, KV pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from strata.backends.base import KvSpec
from strata.backends.hybrid.device_ops import PagedKv
from strata.backends.hybrid.expert_flow import ExpertFlow
from strata.backends.hybrid.expert_stream import ExpertStream
from strata.backends.hybrid.experts_host import HostShare
from strata.backends.hybrid.kv_blocks import DeviceKv
from strata.backends.hybrid.kv_stream import StreamedKv
from strata.backends.hybrid.options import HybridOptions
from strata.backends.hybrid.prefetch import Prefetcher
from strata.backends.hybrid.readback import Readback
from strata.backends.hybrid.split import Split
from strata.backends.hybrid.stream_buffers import StreamBuffers
from strata.memory.expert_cache import ExpertCache
from strata.memory.experts import ExpertSpace
from strata.memory.kv_border import SlotBorder
from strata.plan.spec import ModelSpec

if TYPE_CHECKING:
    from strata.backends.hybrid.backend import HybridBackend


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


def make_expert_parts(backend: HybridBackend, top_k: int) -> ExpertParts:
    """For a backend that has memory, source, cache and loader."""
    memory, options, hidden = backend.memory, backend.options, backend.spec.hidden
    place = backend.device, memory.compute
    ring = options.slot_bytes, options.stream_buffers, options.stream_experts
    buffers = StreamBuffers(*place, memory.queue, backend.source, memory.workspace, *ring)
    split = Split(options.misses, options.speeds)
    share = HostShare(backend.device, backend.cpu, options.rows, hidden, options.simulated)
    readback = Readback(*place, options.rows, hidden, top_k)
    stream = ExpertStream(buffers, backend.loader, split)
    flow = ExpertFlow(backend, backend.loader, stream, share, split, options.heat)
    guesses = Readback(*place, options.rows, hidden, top_k)
    rate = options.speeds.to_device
    return ExpertParts(readback, flow, Prefetcher(backend, backend.loader, guesses, options.prefetch, rate))


def make_kv(backend: HybridBackend, spec: KvSpec, pages: int, settle: Callable[[], None]) -> PagedKv:
    """Expert slots lend their room to pages, but the experts of one token always have theirs.

    settle: makes slots evictable whose experts the device has done with.
    """
    memory = backend.memory
    if memory.kv_staging is not None:
        return StreamedKv(memory, spec, pages, memory.kv_staging, backend.options.staged_blocks)
    region, experts = memory.region, backend.spec.experts
    if experts is None or not region.slots:
        return DeviceKv(memory, spec, pages, None)
    least = min(region.slots, experts.router.top_k)
    border = SlotBorder(region, backend.cache, least, settle)
    return DeviceKv(memory, spec, region.sizes.pages_beside(least), border)
