"""What a plan is asked for, by the configuration and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.plan.cost import Misses
from strata.plan.footprint import Footprint
from strata.plan.speeds import Spread

RESERVE = 3 << 30
"""Device memory that stays free, as field report A needed it for 8 hours of serving."""

MAX_RUNNING = 16
"""Requests that take part in one step at most, however short each is, unless more may fill the context."""

MOST_LOGITS = 64
"""Rows of a step whose logits are wanted, drafts of speculative decoding included, unless more run."""

Tier = Literal["device", "host"]


@dataclass(frozen=True)
class PlanOptions:
    """None: decided by the planner. Sizes in bytes.

    context: tokens of one request; requests: how many may be that long at the same time; max_running: how
    many take part in one step, None: MAX_RUNNING, or `requests` if that is more. depth: tokens of context for
    predictions. device False: the card stays idle. device_memory: of the card, all of it unless told;
    reserve: of it, left free; workspace: the cap of activations and buffers. slots: experts on the device,
    over the whole model. kv_bytes: of the KV cache, on whatever tier. numa False: nothing is bound to memory
    nodes; nodes: those that threads and experts may be on; copies: bytes of every node for copies of the
    hottest experts, where they are interleaved. draft: the model that proposes tokens.
    """

    context: int | None = None
    requests: int = 1
    max_running: int | None = None
    depth: int | None = None
    chunk: int = 512
    threads: int | None = None
    device: bool = True
    device_memory: int | None = None
    reserve: int = RESERVE
    workspace: int | None = None
    slots: int | None = None
    misses: Misses = "auto"
    kv_tier: Tier | None = None
    kv_bytes: int | None = None
    draft: Footprint | None = None
    host_memory: int | None = None
    spread: Spread | None = None
    numa: bool = True
    nodes: tuple[int, ...] | None = None
    copies: int = 0

    @property
    def running(self) -> int:
        """Requests of one step at most."""
        return max(MAX_RUNNING, self.requests) if self.max_running is None else self.max_running

    @property
    def logit_rows(self) -> int:
        """Rows of a step whose logits may be wanted; so many take part in it beside a chunk."""
        return max(MOST_LOGITS, self.running)
