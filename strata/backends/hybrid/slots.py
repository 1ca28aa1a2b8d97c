"""Experts on their way into slots of the device region."""

from __future__ import annotations

from collections.abc import Iterable

from strata.backends.hybrid.expert_source import ExpertSource
from strata.core import ExpertId
from strata.device.base import Buffer, Copy
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim, Handle
from strata.memory.heat import Heat
from strata.memory.regions import DeviceRegion
from strata.memory.transfer import Priority, Transfer, TransferState
from strata.memory.transfers import TransferQueue


class SlotLoader:
    """Turns claims of the cache into transfers, and arrivals into residents.

    A slot that is claimed has no user left: handles are released when the host knows that the device has
    finished, so a transfer into it need not wait for anybody.
    """

    def __init__(
        self, cache: ExpertCache, region: DeviceRegion, queue: TransferQueue, source: ExpertSource
    ) -> None:
        self.cache = cache
        self.region = region
        self.queue = queue
        self.source = source
        self._loads: dict[ExpertId, tuple[Claim, Transfer]] = {}

    def load(self, claim: Claim, priority: Priority, due: int) -> Transfer:
        """Queue the copy of an expert into its slot; due: the running count of its layer."""
        try:
            loan = self.source.lend([claim.expert], passing=False)
        except BaseException:
            self.cache.abandon(claim)
            raise
        (record,) = loan.records
        target = self.region.slot(claim.slot).slice(0, record.nbytes)
        transfer = self.queue.submit([Copy(target, record)], priority, due)
        self.source.bind(loan, transfer)
        self._loads[claim.expert] = claim, transfer
        return transfer

    def warm(self, heat: Heat) -> None:
        """Bring what earlier runs used most, in the background; tell the policy all that they used.

        Nothing is read from the disk for that.
        """
        heat.seed(self.cache.policy)
        for expert in filter(self.source.is_near, heat.warm_order(self.cache.slots)):
            claim = self.cache.admit(expert, insist=True)
            if isinstance(claim, Claim):
                self.load(claim, Priority.SPECULATIVE, expert.layer)

    def has(self, expert: ExpertId) -> bool:
        """Whether an expert has a slot, be it on its way there."""
        return expert in self._loads or self.cache.slot_of(expert) is not None

    def slot(self, handle: Handle) -> Buffer:
        """Where a held expert's record lies, or will lie."""
        return self.region.slot(handle.slot).slice(0, self.source.nbytes(handle.expert.layer))

    def transfer(self, expert: ExpertId) -> Transfer:
        """Of an expert that the cache calls loading."""
        return self._loads[expert][1]

    def settle(self) -> None:
        """What the host knows to have arrived may be used and evicted from now on."""
        arrived = [e for e, (_, t) in self._loads.items() if t.state is TransferState.DONE]
        for expert in arrived:
            self.cache.loaded(self._loads.pop(expert)[0])
        self.source.settle()

    def cancel(self, experts: Iterable[ExpertId]) -> int:
        """Forget loads that were not issued; how many."""
        gone = [e for e in experts if e in self._loads and self.queue.cancel(self._loads[e][1])]
        for expert in gone:
            self.cache.abandon(self._loads.pop(expert)[0])
        return len(gone)
