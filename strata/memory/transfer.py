"""One asynchronous copy between tiers: what it moves, how urgent it is, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal

from strata.device.base import Copy, Event, Stream
from strata.device.buffers import BufferKindError

Direction = Literal["h2d", "d2h"]


class Priority(IntEnum):
    """How urgent; lower goes first."""

    NOW = 0
    """The running layer cannot go on without it."""
    NEXT = 1
    """A layer that comes soon will need it."""
    SPECULATIVE = 2
    """It may be needed; nothing that is needed may wait for much of it."""


class TransferState(Enum):
    """QUEUED -> ISSUED -> DONE, or QUEUED -> CANCELLED."""

    QUEUED = "queued"
    ISSUED = "issued"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Transfer:
    """Copies of one direction that belong together, e.g. the slices of an expert.

    layer: when it is due, as a running count of layers (step * layers + layer), so that the first layer of
    the next step comes after the last of this one. after: events that must be reached before a byte moves:
    the last use of what the destination holds now, the making of what the source holds. The state is the
    queue's to change; the buffers belong to it from submit until the transfer is DONE or CANCELLED.
    """

    copies: tuple[Copy, ...]
    direction: Direction
    priority: Priority
    layer: int
    after: tuple[Event, ...] = ()
    state: TransferState = TransferState.QUEUED
    submitted: float = 0.0
    batch: Batch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return sum(copy.dst.nbytes for copy in self.copies)


@dataclass(eq=False, slots=True)
class Batch:
    """Transfers that were issued together: one event for all. number: in the order of issue per stream."""

    number: int
    stream: Stream
    priority: Priority
    transfers: tuple[Transfer, ...]
    event: Event

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return sum(transfer.nbytes for transfer in self.transfers)


@dataclass
class PriorityCounts:
    """What happened to the transfers of one priority; they count where they were when it happened.

    queued_seconds: from submit to issue, summed. cancelled: never wrote a byte. raised: were made more
    urgent while they waited, and count from then on as of the new priority.
    """

    submitted: int = 0
    issued: int = 0
    cancelled: int = 0
    raised: int = 0
    batches: int = 0
    nbytes: int = 0
    queued_seconds: float = 0.0


@dataclass
class TransferStatistics:
    """staged_bytes: crossed through the staging buffers. staging_waits: found both of them in use."""

    by_priority: dict[Priority, PriorityCounts] = field(
        default_factory=lambda: {priority: PriorityCounts() for priority in Priority}
    )
    staged_bytes: int = 0
    staging_waits: int = 0


def direction_of(copies: tuple[Copy, ...]) -> Direction:
    """The one direction of copies between host and device; BufferKindError otherwise."""
    kinds = {(copy.src.kind == "device", copy.dst.kind == "device") for copy in copies}
    if kinds == {(False, True)}:
        return "h2d"
    if kinds == {(True, False)}:
        return "d2h"
    raise BufferKindError(
        f"a transfer of {len(copies)} copies does not go one way between host and device",
        remedy="give one or more copies, all to the device or all from it",
    )
