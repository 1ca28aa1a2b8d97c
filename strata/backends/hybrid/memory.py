"""The hybrid backend's memory: the device region, cut once, and the pinned buffers beside it."""

from __future__ import annotations

from contextlib import ExitStack

from strata.backends.base import KvSpec
from strata.backends.hybrid.options import HybridOptions
from strata.backends.hybrid.uploads import StaticWeights, Uploads
from strata.device.base import Device
from strata.memory.regions import ALIGNMENT, DeviceRegion, RegionSizes, aligned
from strata.memory.transfers import TransferQueue
from strata.plan.activations import (
    DRAFT_WORDS,
    PIECES_BYTES,
    TICKETS,
    logit_row_elements,
    row_elements,
    scratch_bytes,
)
from strata.plan.spec import ModelSpec

TABLES = 8
"""Tables of one launch of experts, at most: by expert, by row, and by (row, choice) pair."""
ROW_TABLES = 2 + 10
"""Numbers of 4 bytes that a row needs besides: token and position; attention's tables of rows and tiles."""


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
        self.tickets = self.workspace.take(4 * TICKETS, "tickets")
        device.fill(self.tickets, 0, self.compute)
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
    """Most bytes of the workspace that a pass takes: activations, scratch, logits, and the stream buffers."""
    rows = options.rows * row_elements(spec, kv.key_dim, kv.value_dim)
    logits = options.logit_rows * logit_row_elements(spec.hidden, spec.vocab)
    stream = 0
    if spec.experts is not None:
        stream = options.stream_buffers * options.stream_experts * aligned(options.slot_bytes)
    scratch = scratch_bytes(spec, kv.kv_heads, kv.value_dim)
    return 4 * (rows + logits) + scratch + stream + PIECES_BYTES


def inputs_bytes(spec: ModelSpec, options: HybridOptions) -> int:
    """Pinned memory for what a pass brings: rows, rope tables, page table, rows of logits, drafts, expert
    tables."""
    rows = options.rows * (spec.hidden + spec.attention.rope.rotary_dim + ROW_TABLES)
    tables = 0
    if spec.experts is not None:
        router = spec.experts.router
        groups = 3 + -(-router.experts // options.stream_experts)
        each = 16 * router.experts + 4 * options.rows + TABLES * ALIGNMENT
        tables = spec.layers * (groups * each + 16 * options.rows * router.top_k)
    return 4 * (rows + (1 + DRAFT_WORDS) * options.logit_rows) + 8 * options.blocks + tables + PIECES_BYTES
