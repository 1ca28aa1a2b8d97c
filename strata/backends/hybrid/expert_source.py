"""Where the records of experts lie in host memory, for transfers to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from strata.backends.parts import ExpertBank
from strata.core import ExpertId
from strata.device.base import Buffer, Device
from strata.memory.expert_arrivals import Arriving
from strata.memory.expert_host import HostExperts
from strata.memory.locked_pieces import LockedPieces, LockOptions
from strata.memory.transfer import Transfer, TransferState

_OVER = (TransferState.DONE, TransferState.CANCELLED)


@dataclass(eq=False)
class Loan:
    """Records that a transfer reads, in the order of the experts asked for.

    own: buffers of this loan alone; kept: experts that must stay in the host's cache as long.
    """

    records: list[Buffer] = field(default_factory=list)
    own: list[Buffer] = field(default_factory=list)
    kept: list[Arriving] = field(default_factory=list)
    transfer: Transfer | None = None


class ExpertSource:
    """The experts' records in host memory as buffers that transfers read.

    Records that are always in memory become buffers once, and are page-locked as `locks` says. Where memory
    is a cache of the disk, they come through it, and their places are held until the transfer that reads them
    is over; so many at most as leave half of the cache to others. What exceeds that, or passes through
    without a place, is copied.
    """

    def __init__(self, device: Device, locks: LockOptions) -> None:
        self._device = device
        self.pieces = LockedPieces(device, locks)
        self._banks: dict[int, ExpertBank] = {}
        self._loans: list[Loan] = []

    def know(self, banks: Sequence[ExpertBank]) -> None:
        """Banks of the model; each says which layer it is of."""
        self._banks.update((bank.layer, bank) for bank in banks)

    def bank(self, layer: int) -> ExpertBank:
        """The experts of a layer."""
        return self._banks[layer]

    def nbytes(self, layer: int) -> int:
        """Of a record."""
        return self._banks[layer].layout.record_bytes

    def is_near(self, expert: ExpertId) -> bool:
        """Whether a record can be had without waiting for the disk."""
        tier = self._banks[expert.layer].tier
        return tier is None or tier.has(expert)

    def lend(self, experts: Sequence[ExpertId], *, passing: bool) -> Loan:
        """The records of experts, to be bound to a transfer at once. passing: they need not stay in memory.

        StoreError for one that cannot be read.
        """
        self.settle()
        loan = Loan()
        self._loans.append(loan)
        try:
            for expert in experts:
                tier = self._banks[expert.layer].tier
                if tier is None:
                    record = self._banks[expert.layer].record(expert.index)
                    loan.records.append(
                        self.pieces.buffer(record, f"expert {expert.index} of layer {expert.layer}")
                    )
                else:
                    self._bring(loan, tier, expert, passing)
        except BaseException:
            self._end(loan)
            raise
        return loan

    def bind(self, loan: Loan, transfer: Transfer) -> None:
        """The loan lasts until the transfer is over."""
        loan.transfer = transfer

    def settle(self) -> None:
        """End the loans whose transfers are over."""
        for loan in [one for one in self._loans if one.transfer is not None and one.transfer.state in _OVER]:
            self._end(loan)

    def close(self) -> None:
        """End everything. Nothing is on the bus any more."""
        for loan in list(self._loans):
            self._end(loan)
        self.pieces.close()

    def _bring(self, loan: Loan, tier: HostExperts, expert: ExpertId, passing: bool) -> None:
        arriving = tier.lend(expert, passing=passing)
        try:
            record = next(arriving)[expert.index]
            kept = sum(len(one.kept) for one in self._loans)
            if arriving.is_kept and kept < tier.cache.slots // 2:
                loan.kept.append(arriving)
            else:
                record = np.array(record)
        finally:
            if not loan.kept or loan.kept[-1] is not arriving:
                arriving.close()
        if loan.kept and loan.kept[-1] is arriving:
            place = self.pieces.buffer(tier.place_of(record), "a place for experts", changes=True)
            loan.records.append(place.slice(0, record.nbytes))
            return
        buffer = self._device.host_pageable(record, f"{expert}")
        loan.own.append(buffer)
        loan.records.append(buffer)

    def _end(self, loan: Loan) -> None:
        self._loans.remove(loan)
        for buffer in loan.own:
            self._device.free(buffer)
        for arriving in loan.kept:
            arriving.close()
