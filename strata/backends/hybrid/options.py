"""What the hybrid backend is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.memory.heat import Heat
from strata.memory.locked_pieces import LockOptions
from strata.memory.policies import POLICIES, PolicyFactory
from strata.memory.transfers import TransferOptions
from strata.plan.cost import Misses
from strata.plan.options import Tier
from strata.plan.speeds import Speeds

DECODE_TOKENS = 16
"""A sequence with at most so many new tokens is decoding (one token, or a draft to verify): the expert cache
learns from it. More tokens are a prompt's."""


@dataclass(frozen=True)
class HybridOptions:
    """slots: experts on the device; slot_bytes: of the largest expert's record (0 slots: anything above 0).

    rows: the most tokens of a pass; logit_rows: of them, whose logits are wanted; blocks: the most KV pages
    of a pass, counted once per sequence.
    stream_buffers, stream_experts: a ring of so many reserved buffers for so many experts each. What crosses
    while a prompt's chunk goes through attention must lie in it: with 4,096 tokens, 2 x 4 experts of
    Qwen3-30B-A3B's shape hid 37 % of the copies, 32 x 4 (a layer, 320 MB) nearly all (virtual time).
    kv_tier: where KV pages live; staged_blocks: for pages at the host, the most distinct ones of a pass,
    whose blocks of two layers are on the device.
    locks: how the experts' memory is page-locked; what is not crosses through the staging buffers.
    inserts_per_step: bound on experts admitted to the cache in one step. prefetch: the least share of a
    token's weight with which a guessed expert is fetched ahead; above 1: none is.
    heat: what earlier runs used: the cache starts warm, in the background; it learns what decoding uses, and
    saving it is the caller's business.
    graphs: passes of few rows launch what lies before a layer's read-back as one graph (`graphs`).
    simulated: speeds by which the host's work moves the device's clock on (the emulated one, whose time is
    not the host's).
    """

    slots: int
    slot_bytes: int
    speeds: Speeds
    misses: Misses = "auto"
    rows: int = 576
    logit_rows: int = 64
    blocks: int = 4096
    stream_buffers: int = 2
    stream_experts: int = 4
    kv_tier: Tier = "device"
    staged_blocks: int = 0
    locks: LockOptions = field(default_factory=LockOptions)
    inserts_per_step: int | None = 16
    prefetch: float = 0.2
    policy: PolicyFactory = POLICIES["lru"]
    transfers: TransferOptions = field(default_factory=lambda: TransferOptions(staging_bytes=4 << 20))
    heat: Heat | None = None
    graphs: bool = False
    simulated: Speeds | None = None
