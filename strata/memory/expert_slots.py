"""The plain data of the expert cache: slots, claims on them, answers, counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from strata.core import ExpertId


class SlotState(Enum):
    """free -> loading (claimed; its bytes are on the way) -> resident -> free."""

    FREE = "free"
    LOADING = "loading"
    RESIDENT = "resident"


class Slot:
    """Room for one expert. claims: how often it was claimed so far, to tell an old Claim from a new one."""

    __slots__ = ("claims", "expert", "handles", "state")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.expert: ExpertId | None = None
        self.handles = 0
        self.claims = 0

    @property
    def evictable(self) -> bool:
        """Whether its expert may go now."""
        return self.state is SlotState.RESIDENT and not self.handles


class Handle:
    """A counted claim that forbids eviction: valid until it is released, which must happen exactly once.

    Release it when the device has finished reading the slot, not when the work was queued.
    """

    __slots__ = ("expert", "held", "slot")

    def __init__(self, expert: ExpertId, slot: int) -> None:
        self.expert = expert
        self.slot = slot
        self.held = True

    def __repr__(self) -> str:
        return f"Handle({self.expert}, slot {self.slot}, {'held' if self.held else 'released'})"


@dataclass(frozen=True)
class Claim:
    """A slot to load an expert into. evicted: who was there. claims: the slot's count at that time."""

    expert: ExpertId
    slot: int
    evicted: ExpertId | None
    claims: int


class Refusal(Enum):
    """Why an expert was not admitted; the caller computes it on the CPU or streams it through."""

    PRESENT = "it has a slot already"
    BUDGET = "the inserts of this step are used up"
    OCCUPIED = "every slot is held or loading"
    WORTH = "the policy expects more of every expert that could make room"


@dataclass(frozen=True)
class Acquired:
    """What the cache has of the experts that a router chose. All handles must be released.

    loading: in a slot, but the bytes are not there yet: wait for the transfer, or release and compute
    elsewhere.
    """

    hits: list[Handle]
    loading: list[Handle]
    misses: list[ExpertId]

    @property
    def handles(self) -> list[Handle]:
        """Everything to release."""
        return self.hits + self.loading


@dataclass
class CacheStatistics:
    """Counted since the cache was made. Prefill is counted apart: its rates say nothing about decode.

    late: misses whose bytes were already on the way. layer_hits, layer_misses `[layers]`: decode only, late
    ones among the misses. layer_inserts `[layers]`: claims of a slot.
    """

    layer_hits: list[int]
    layer_misses: list[int]
    layer_inserts: list[int]
    late: int = 0
    evictions: int = 0
    abandoned: int = 0
    prefill_hits: int = 0
    prefill_misses: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)

    @property
    def hits(self) -> int:
        """Over all layers."""
        return sum(self.layer_hits)

    @property
    def misses(self) -> int:
        """Over all layers."""
        return sum(self.layer_misses)

    @property
    def inserts(self) -> int:
        """Over all layers."""
        return sum(self.layer_inserts)

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)
