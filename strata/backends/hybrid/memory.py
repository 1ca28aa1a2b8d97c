"""The hybrid backend's memory: the device region, cut once, and the pinned buffers beside it."""

from __future__ import annotations

from contextlib import ExitStack

from strata.backends.base import KvSpec
from strata.backends.hybrid.options import HybridOptions
from strata.backends.hybrid.uploads import StaticWeights, Uploads
from strata.device.base import Device
from strata.memory.regions import ALIGNMENT, DeviceRegion, RegionSizes, aligned
from strata.memory.transfers import TransferQueue
from strata.plan.spec import ModelSpec

TABLES = 8
"""Tables of one launch of experts, at most: by expert, by row, and by (row, choice) pair."""
PIECES = 64
"""Arrays of one layer in the workspace at once, at most: each may lose a line to alignment."""


class HybridMemory:
    """Owns the region, the compute stream, the transfer queue and the inputs of a pass."""

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        kv: KvSpec,
        pages: int,
        static_bytes: int,
        options: HybridOptions,
    ) -> None:
        """CapacityError when the device is too small for slots, pages, weights and workspace."""
        on_device = pages if options.kv_tier == "device" else 0
        staging = 2 * options.staged_blocks * kv.layer_bytes if options.kv_tier == "host" else 0
        sizes = RegionSizes(
            static=static_bytes + aligned(staging),
            shared=options.slots * aligned(options.slot_bytes) + on_device * aligned(kv.page_bytes),
            workspace=workspace_bytes(spec, kv, options),
            slot_bytes=options.slot_bytes,
            page_bytes=kv.page_bytes,
        )
        self.device = device
        self.region = DeviceRegion(device, sizes, options.slots)
        self.compute = device.stream("compute")
        self.queue = TransferQueue(device, options.transfers)
        self.workspace = self.region.workspace
        self.kv_staging = self.region.static.take(staging, "KV staging") if staging else None
        self.static = StaticWeights(device, self.region.static, self.queue, self.compute)
        self.uploads = Uploads(device, self.compute, inputs_bytes(spec, options))
        self._step = ExitStack()

    def begin_step(self) -> None:
        """What the last pass took from the workspace is free again, and its inputs may be overwritten."""
        self._step.close()
        self._step.enter_context(self.workspace.scope())
        self.uploads.begin()

    def check_integrity(self) -> None:
        """AssertionError when region or queue are not sound."""
        self.region.check_integrity()
        self.queue.check_integrity()


def workspace_bytes(spec: ModelSpec, kv: KvSpec, options: HybridOptions) -> int:
    """Most bytes of the workspace that a pass takes: activations, logits, and the stream buffers."""
    a, experts = spec.attention, spec.experts
    rope = a.rope.rotary_dim
    if a.mla is None:
        qkv = (a.heads + 2 * a.kv_heads) * a.head_dim
        attention = 2 * qkv + a.heads * a.head_dim
    else:
        query = a.heads * (a.mla.qk_nope_head_dim + a.mla.qk_rope_head_dim)
        value = a.heads * (kv.value_dim + a.mla.v_head_dim)
        attention = 2 * a.mla.q_lora_rank + 2 * query + value + a.heads * (kv.key_dim + kv.value_dim)
        attention += 5 * kv.key_dim
    routed = 0
    if experts is not None:
        # Normed rows, logits, ids and weights, of two routers; experts' sum, shared expert.
        routed = 2 * spec.hidden + 2 * (experts.router.experts + 2 * experts.router.top_k) + 1
    layer = 2 * spec.hidden + max(attention, routed)
    activations = options.rows * (spec.hidden + rope + layer)
    logits = options.logit_rows * (2 * spec.hidden + spec.vocab + 1)
    stream = 0
    if experts is not None:
        stream = options.stream_buffers * options.stream_experts * aligned(options.slot_bytes)
    return 4 * (activations + logits) + stream + PIECES * ALIGNMENT


def inputs_bytes(spec: ModelSpec, options: HybridOptions) -> int:
    """Pinned memory for what a pass brings: rows, rope tables, page table, rows of logits, expert tables."""
    rows = options.rows * (spec.hidden + spec.attention.rope.rotary_dim + 2)
    tables = 0
    if spec.experts is not None:
        router = spec.experts.router
        groups = 3 + -(-router.experts // options.stream_experts)
        each = 16 * router.experts + 4 * options.rows + TABLES * ALIGNMENT
        tables = spec.layers * (groups * each + 16 * options.rows * router.top_k)
    return 4 * (rows + options.logit_rows) + 8 * options.blocks + tables + PIECES * ALIGNMENT
