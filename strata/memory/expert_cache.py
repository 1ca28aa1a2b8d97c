"""Which expert is in which slot of the device region. Bookkeeping only: no bytes move here.

One thread owns a cache. Transfers that end on other threads report to that thread, which then calls `loaded`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from strata.core import ExpertId
from strata.errors import CapacityError
from strata.memory.expert_slots import Acquired, CacheStatistics, Claim, Handle, Refusal, Slot, SlotState
from strata.memory.experts import ExpertSpace
from strata.memory.policies.base import PolicyFactory


class ExpertCache:
    """Slots keyed by ExpertId over the whole model: layers compete for them, none has a share of its own.

    inserts_per_step: bound on admitted experts between two calls of `begin_step`; None = no bound. Nothing
    here waits: an expert that finds no slot is refused, so as many slots as a router chooses experts (even
    none) are enough to go on. The buffers through which a large prefill streams are no slots of the cache.
    """

    def __init__(
        self, space: ExpertSpace, slots: int, policy: PolicyFactory, *, inserts_per_step: int | None = None
    ) -> None:
        if slots < 0:
            raise ValueError(f"{slots} slots")
        self.space = space
        self.policy = policy(space, slots)
        self.inserts_per_step = inserts_per_step
        layers = len(space.per_layer)
        self.statistics = CacheStatistics([0] * layers, [0] * layers, [0] * layers)
        self._slots = [Slot() for _ in range(slots)]
        self._free = list(range(slots))  # a heap: low slots first, so that the end is free to be given away
        self._where: dict[ExpertId, int] = {}
        self._missed: dict[ExpertId, None] = {}  # of this step, in the order of access
        self._inserted = 0  # in this step
        self._turn = ExpertId(0, 0)  # the first that the budget left out, when it last ran out

    # -- the step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A new step: its inserts count from 0, and the misses of the last one are forgotten."""
        self._inserted = 0
        self._missed.clear()

    def acquire(self, layer: int, experts: Sequence[int], *, prefill: bool = False) -> Acquired:
        """Claim what is there of the experts (indices) that the router of `layer` chose.

        Each expert counts once, however often it is named. prefill: the policy does not learn from it and
        `admit_misses` leaves it out, so that a long prompt does not displace what decode needs.
        """
        distinct = list(dict.fromkeys(experts))
        ids = [self._checked(ExpertId(layer, index)) for index in distinct]
        acquired = Acquired([], [], [])
        for expert in ids:
            place = self._where.get(expert)
            if place is None:
                acquired.misses.append(expert)
                continue
            ready = self._slots[place].state is SlotState.RESIDENT
            (acquired.hits if ready else acquired.loading).append(self._hold(expert, place))
        self._count(layer, acquired, prefill)
        if not prefill:
            self.policy.on_access(layer, distinct)
            self._missed.update(dict.fromkeys(acquired.misses))
        return acquired

    def hold(self, expert: ExpertId) -> Handle | None:
        """A handle on an expert that is resident or loading (a prefetch that must not be lost); else None."""
        place = self._where.get(expert)
        return None if place is None else self._hold(expert, place)

    def release(self, handle: Handle) -> None:
        """Give a handle back. ValueError when that was done before."""
        if not handle.held:
            raise ValueError(f"{handle} was released twice")
        handle.held = False
        self._slots[handle.slot].handles -= 1

    # -- admission and loading -----------------------------------------------------------------------------

    def admit(self, expert: ExpertId, *, insist: bool = False) -> Claim | Refusal:
        """Claim a slot for an expert, evicting another one where none is free; the caller then loads it.

        insist: neither the step's budget nor the policy's opinion of its worth counts (warm start, or an
        expert that is fetched in any case). Never evicts what is held or loading.
        """
        return self._admit(self._checked(expert), budgeted=not insist, choosy=not insist)

    def admit_misses(self, *, choosy: bool = True) -> list[Claim]:
        """Offer what this step missed, the most valuable first, until the budget or the room is used up.

        Among equals those come first that the budget left out last time: in the order of access the first
        layers would have all of it (LRU, GLM-4.5-Air simulated on a 3090: 71 % hits instead of 79 %).
        choosy: ask the policy whether a miss is worth its victim's slot; False compares evictions alone.
        """
        claims = []
        missed, self._missed = list(self._missed), {}
        missed = [e for e in missed if e >= self._turn] + [e for e in missed if e < self._turn]
        for expert in self.policy.by_worth(missed):
            answer = self._admit(expert, budgeted=True, choosy=choosy)
            if isinstance(answer, Claim):
                claims.append(answer)
            elif answer in (Refusal.BUDGET, Refusal.OCCUPIED):
                self._turn = expert if answer is Refusal.BUDGET else self._turn
                break
        return claims

    def loaded(self, claim: Claim) -> None:
        """The bytes are in the slot: it may be used and evicted. ValueError if the claim does not stand."""
        self._claimed(claim).state = SlotState.RESIDENT

    def abandon(self, claim: Claim) -> None:
        """The load was cancelled before any byte can still arrive: the slot is free again.

        ValueError for a claim that does not stand, or while a handle is held on it.
        """
        slot = self._claimed(claim)
        if slot.handles:
            raise ValueError(f"{claim.expert} is abandoned with {slot.handles} handles on slot {claim.slot}")
        self._vacate(claim.slot)
        heapq.heappush(self._free, claim.slot)
        self.statistics.abandoned += 1

    # -- size ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """All slots, free ones included."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def smallest(self) -> int:
        """What `resize` may shrink to at this moment."""
        return 1 + max((i for i, slot in enumerate(self._slots) if self._is_busy(slot)), default=-1)

    def resize(self, slots: int) -> range:
        """Add free slots at the end, or give slots at the end away: their experts are evicted.

        Returns the slots given away (empty when growing). CapacityError, and no change, when one of them is
        held or loading; `smallest` says what is possible now.
        """
        if slots < self.smallest:
            blocking = self._slots[self.smallest - 1]
            reason = "held" if blocking.handles else "loading"
            raise CapacityError(
                f"the cache shall shrink to {slots} slots, but slot {self.smallest - 1} is {reason}",
                remedy=f"shrink to {self.smallest}, or after the running step",
            )
        given = range(slots, len(self._slots))
        for place in given:
            if self._slots[place].state is SlotState.RESIDENT:
                self._vacate(place)
                self.statistics.evictions += 1
        added = range(len(self._slots), slots)
        self._slots = self._slots[:slots] + [Slot() for _ in added]
        self._free = [place for place in self._free if place < slots] + list(added)
        heapq.heapify(self._free)
        self.policy.on_resize(slots)
        return given

    # -- what is where -------------------------------------------------------------------------------------

    def slot_of(self, expert: ExpertId) -> int | None:
        """Where an expert is resident; None when it is not, or not yet."""
        place = self._where.get(expert)
        ready = place is not None and self._slots[place].state is SlotState.RESIDENT
        return place if ready else None

    def count(self, state: SlotState) -> int:
        """Slots in this state."""
        return sum(slot.state is state for slot in self._slots)

    def check_integrity(self) -> None:
        """Slots, free list and index agree, counts are not negative (AssertionError)."""
        free = [place for place, slot in enumerate(self._slots) if slot.state is SlotState.FREE]
        _check(sorted(self._free) == free, f"free list {sorted(self._free)}, free slots {free}")
        used = {slot.expert: i for i, slot in enumerate(self._slots) if slot.state is not SlotState.FREE}
        _check(used == self._where, f"slots hold {used}, the index says {self._where}")
        _check(len(used) + len(free) == len(self._slots), "an expert is in two slots")
        for place, slot in enumerate(self._slots):
            _check(slot.handles >= 0, f"slot {place} has {slot.handles} handles")
            _check((slot.expert is None) == (slot.state is SlotState.FREE), f"slot {place}: {slot.state}")
            _check(slot.state is not SlotState.FREE or not slot.handles, f"free slot {place} is held")

    # -- inside --------------------------------------------------------------------------------------------

    def _admit(self, expert: ExpertId, *, budgeted: bool, choosy: bool) -> Claim | Refusal:
        answer = self._find_slot(expert, budgeted, choosy)
        if isinstance(answer, Refusal):
            self.statistics.refused[answer] += 1
            return answer
        return self._occupy(expert, *answer)

    def _find_slot(
        self, expert: ExpertId, budgeted: bool, choosy: bool
    ) -> tuple[int, ExpertId | None] | Refusal:
        """A free slot and whom it was taken from."""
        if expert in self._where:
            return Refusal.PRESENT
        if budgeted and self.inserts_per_step is not None and self._inserted >= self.inserts_per_step:
            return Refusal.BUDGET
        if self._free:
            return heapq.heappop(self._free), None
        evicted = self.policy.victim(self._may_go)
        if evicted is None:
            return Refusal.OCCUPIED
        if choosy and not self.policy.admits(expert, evicted):
            return Refusal.WORTH
        place = self._where[evicted]
        self._vacate(place)
        self.statistics.evictions += 1
        return place, evicted

    def _occupy(self, expert: ExpertId, place: int, evicted: ExpertId | None) -> Claim:
        slot = self._slots[place]
        slot.state, slot.expert = SlotState.LOADING, expert
        slot.claims += 1
        self._where[expert] = place
        self._missed.pop(expert, None)
        self._inserted += 1
        self.statistics.layer_inserts[expert.layer] += 1
        self.policy.on_insert(expert)
        return Claim(expert, place, evicted, slot.claims)

    def _vacate(self, place: int) -> None:
        slot = self._slots[place]
        assert slot.expert is not None and not slot.handles
        self.policy.on_evict(slot.expert)
        del self._where[slot.expert]
        slot.state, slot.expert = SlotState.FREE, None

    def _may_go(self, expert: ExpertId) -> bool:
        return self._slots[self._where[expert]].evictable

    def _is_busy(self, slot: Slot) -> bool:
        return slot.state is SlotState.LOADING or slot.handles > 0

    def _hold(self, expert: ExpertId, place: int) -> Handle:
        self._slots[place].handles += 1
        return Handle(expert, place)

    def _claimed(self, claim: Claim) -> Slot:
        slot = self._slots[claim.slot] if claim.slot < len(self._slots) else None
        if slot is None or slot.state is not SlotState.LOADING or slot.claims != claim.claims:
            raise ValueError(f"the claim of {claim.expert} on slot {claim.slot} does not stand any more")
        return slot

    def _checked(self, expert: ExpertId) -> ExpertId:
        if expert not in self.space:
            raise ValueError(f"the model has no {expert}")
        return expert

    def _count(self, layer: int, acquired: Acquired, prefill: bool) -> None:
        statistics = self.statistics
        missed = len(acquired.misses) + len(acquired.loading)
        if prefill:
            statistics.prefill_hits += len(acquired.hits)
            statistics.prefill_misses += missed
            return
        statistics.layer_hits[layer] += len(acquired.hits)
        statistics.layer_misses[layer] += missed
        statistics.late += len(acquired.loading)


def _check(sound: bool, problem: str) -> None:
    if not sound:
        raise AssertionError(problem)
