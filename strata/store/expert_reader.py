"""Expert records read from the disk past the page cache, several at once."""

from __future__ import annotations

import errno
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.core import ExpertId
from strata.errors import StoreError
from strata.store.reader import Bytes, Store

if TYPE_CHECKING:
    from strata._C import DirectReader

READ_THREADS = 8
"""Reads in flight: an NVMe drive gives its full rate from 4 to 8 reads of an expert's size on."""
MOST_OPEN = 64
"""Descriptors at a time. Opening a file again costs some 5 us, reading an expert 1,000."""
_REMEDY = "`strata verify` lists the damage; convert the model again"


@dataclass(frozen=True)
class ReadTotals:
    """Since the reader was made. busy_seconds: time in which at least one read ran. buffered: files that the
    page cache had to serve; reason: why the first of them."""

    reads: int
    nbytes: int
    busy_seconds: float
    buffered: int
    reason: str

    @property
    def bandwidth(self) -> float:
        """Bytes per second while reading; 0 before the first read."""
        return self.nbytes / self.busy_seconds if self.busy_seconds else 0.0


class ExpertReader:
    """Reads a store's expert records into arrays of the caller's. Belongs to one thread.

    A record is one read: it lies in one piece, on 4 KiB boundaries. An array belongs to the reader from
    `submit` until `finished` reports its ticket or `cancel` says that the read never began.
    """

    def __init__(
        self, store: Store, *, threads: int = READ_THREADS, most_open: int = MOST_OPEN, direct: bool = True
    ) -> None:
        """direct False: through the page cache."""
        from strata import _C

        self._files = store.expert_files
        self._ranges = {layer: store.expert_range(layer) for layer in store.manifest.layers}
        self._outcomes = {_C.READ_SHORT: "is shorter than it was", _C.READ_CHANGED: "has changed"}
        self._experts: dict[int, ExpertId] = {}  # by ticket
        self._looked = False  # whether the first read was a direct one
        self._reader: DirectReader = _C.DirectReader(self._files, threads, most_open, direct)

    def submit(self, expert: ExpertId, into: Bytes, *, urgent: bool) -> int:
        """Begin to read a record into u8 `[record_bytes]`, 4 KiB aligned; a ticket. Urgent ones go first."""
        place = self._ranges[expert.layer]
        if into.nbytes != place.stop - place.start:
            raise ValueError(f"{expert} has {place.stop - place.start} bytes, room is for {into.nbytes}")
        ticket: int = self._reader.submit(expert.index, place.start, into, urgent)
        self._experts[ticket] = expert
        return ticket

    def hurry(self, ticket: int) -> None:
        """It is needed now: before all that is not urgent, unless it has begun."""
        self._reader.hurry(ticket)

    def cancel(self, ticket: int) -> bool:
        """True: it had not begun and never will. False: it will be reported."""
        if not self._reader.cancel(ticket):
            return False
        del self._experts[ticket]
        return True

    def finished(self, seconds: float) -> list[tuple[int, StoreError | None]]:
        """Tickets of reads that have ended since the last call, with what went wrong.

        Waits for the first one up to `seconds`, unless nothing is being read.
        """
        ended = self._reader.finished(seconds)
        if ended and not self._looked:
            self._looked = True
            self._tell_buffered()
        return [(ticket, self._problem(ticket, code)) for ticket, code in ended]

    def totals(self) -> ReadTotals:
        """Sums for metrics."""
        found = self._reader.totals()
        reason = _name(found["reason"]) if found["reason"] else ""
        return ReadTotals(found["reads"], found["bytes"], found["busy_seconds"], found["buffered"], reason)

    @property
    def open_files(self) -> int:
        """Descriptors held now."""
        found: int = self._reader.open_files
        return found

    def close(self) -> None:
        """Wait for what runs; nothing is written into any array afterwards."""
        self._reader.close()

    def _tell_buffered(self) -> None:
        reason = self.totals().reason
        if reason:
            folder = Path(self._files[0].path).parent
            warnings.warn(
                f"{folder} refuses direct reads ({reason}): experts come through the page cache, which takes "
                "memory and time of its own",
                RuntimeWarning,
                stacklevel=2,
            )

    def _problem(self, ticket: int, outcome: int) -> StoreError | None:
        expert = self._experts.pop(ticket)
        if outcome == 0:
            return None
        path = self._files[expert.index].path
        where = f"expert {expert.index} of layer {expert.layer} cannot be read"
        if outcome in self._outcomes:
            remedy = "leave a store alone while it is in use, then start again; " + _REMEDY
            return StoreError(f"{where}: {path} {self._outcomes[outcome]} since it was opened", remedy=remedy)
        remedy = "the disk may be failing: look at dmesg; " + _REMEDY if outcome == errno.EIO else _REMEDY
        return StoreError(f"{where}: {path}: {os.strerror(outcome)} ({_name(outcome)})", remedy=remedy)


def _name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
