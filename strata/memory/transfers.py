"""The queue of transfers: what crosses the bus next, in both directions.

The engine thread drives it: `submit` queues, `begin_layer` and `pump` issue what is due, `wait` makes a
stream wait for a transfer, `finish` makes the host wait, `poll` notices what is done. No call but `finish`
(and staging, when both its buffers are in use) waits for the device.

Per direction there are two streams, one for what is needed now and one for what is fetched ahead, so that a
fetch that waits for its slot never holds up an urgent one. Transfers of one priority and layer that are
issued together are one batch: one handshake, one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from strata.device.base import Copy, Device, DeviceError, Event, Stream
from strata.memory.staging import Staging
from strata.memory.transfer import (
    Batch,
    Direction,
    Priority,
    Transfer,
    TransferState,
    TransferStatistics,
    direction_of,
)

DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")


@dataclass(frozen=True)
class TransferOptions:
    """depth: how many layers before its use a NEXT transfer may be issued (1: double buffering).

    speculative_bytes: of SPECULATIVE transfers under way at once, per direction; one transfer always may.
    staging_bytes: of each of the two staging buffers; 0: all host memory is page-locked.
    """

    depth: int = 1
    speculative_bytes: int = 16 << 20
    staging_bytes: int = 0


class TransferQueue:
    """See the module's text. It owns its streams, events and staging buffers; the device outlives it."""

    def __init__(self, device: Device, options: TransferOptions) -> None:
        self.options = options
        self.layer = 0
        self.statistics = TransferStatistics()
        self._device = device
        self._staging = Staging(device, options.staging_bytes, self.statistics)
        self._queued: list[Transfer] = []
        urgent = {d: device.stream(f"{d} now") for d in DIRECTIONS}
        ahead = {d: device.stream(f"{d} ahead") for d in DIRECTIONS}
        self._streams = {True: urgent, False: ahead}
        self._under_way: dict[Stream, deque[Batch]] = {
            stream: deque() for streams in (urgent, ahead) for stream in streams.values()
        }
        self._spare_events: list[Event] = []
        self._batches = 0
        # Per (waiting stream, copy stream): the last batch waited for. Streams are in order, so an earlier
        # batch of the same stream needs no wait of its own.
        self._waited: dict[tuple[Stream, Stream], int] = {}
        # Per (copy stream, event of `after`): the point that was waited for.
        self._followed: dict[tuple[Stream, Event], int] = {}

    # What is to be moved

    def submit(
        self, copies: Sequence[Copy], priority: Priority, layer: int, after: Iterable[Event] = ()
    ) -> Transfer:
        """Queue a transfer; nothing moves before the next pump. See Transfer for `layer` and `after`."""
        pieces = tuple(copies)
        transfer = Transfer(pieces, direction_of(pieces), priority, layer, tuple(after))
        transfer.submitted = self._device.now()
        self.statistics.by_priority[priority].submitted += 1
        self._queued.append(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> bool:
        """Forget a transfer that was not issued: it never writes. False when it is too late for that."""
        if transfer.state is not TransferState.QUEUED:
            return False
        self._queued.remove(transfer)
        transfer.state = TransferState.CANCELLED
        self.statistics.by_priority[transfer.priority].cancelled += 1
        return True

    def raise_priority(self, transfer: Transfer, priority: Priority) -> None:
        """Make a queued transfer more urgent; no effect on others, or when it is as urgent already."""
        if transfer.state is TransferState.QUEUED and priority < transfer.priority:
            self.statistics.by_priority[transfer.priority].raised += 1
            transfer.priority = priority

    # Issuing

    def begin_layer(self, layer: int) -> None:
        """The engine turns to this layer (a running count): transfers for layer + depth may now be issued."""
        self.layer = layer
        self.pump()

    def pump(self) -> None:
        """Issue everything that is due: NOW first, then NEXT by layer, then SPECULATIVE within its bound."""
        self.poll()
        for direction in DIRECTIONS:
            queued = [transfer for transfer in self._queued if transfer.direction == direction]
            due = [t for t in queued if self._is_due(t)]
            due.sort(key=lambda transfer: (transfer.priority, transfer.layer))
            for _, group in groupby(due, key=lambda transfer: (transfer.priority, transfer.layer)):
                self._issue(list(group))
            self._issue_speculative([t for t in queued if t.priority is Priority.SPECULATIVE])

    def _is_due(self, transfer: Transfer) -> bool:
        near = transfer.layer <= self.layer + self.options.depth
        return transfer.priority is Priority.NOW or (transfer.priority is Priority.NEXT and near)

    def _issue_speculative(self, candidates: list[Transfer]) -> None:
        """One batch at a time, for the nearest layer, so that urgent transfers wait for little."""
        if not candidates or self._speculative_batches(candidates[0].direction):
            return
        layer = min(transfer.layer for transfer in candidates)
        chosen: list[Transfer] = []
        room = self.options.speculative_bytes
        for transfer in candidates:
            if transfer.layer == layer and (not chosen or transfer.nbytes <= room):
                chosen.append(transfer)
                room -= transfer.nbytes
        self._issue(chosen)

    def _speculative_batches(self, direction: Direction) -> int:
        batches = self._under_way[self._streams[False][direction]]
        return sum(batch.priority is Priority.SPECULATIVE for batch in batches)

    def _issue(self, transfers: list[Transfer]) -> Batch:
        """One batch of transfers of the same direction and priority."""
        first = transfers[0]
        stream = self._streams[first.priority is Priority.NOW][first.direction]
        self._order(stream, dict.fromkeys(event for transfer in transfers for event in transfer.after))
        self._batches += 1
        copies = [copy for transfer in transfers for copy in transfer.copies]
        self._enqueue(copies, first.direction, stream, f"layer {first.layer}")
        event = self._spare_events.pop() if self._spare_events else self._device.event()
        self._device.record(event, stream)
        batch = Batch(self._batches, stream, first.priority, tuple(transfers), event)
        self._under_way[stream].append(batch)
        self._note_issued(batch)
        return batch

    def _order(self, stream: Stream, events: Iterable[Event]) -> None:
        """Wait for events, but not again for a point that this stream has waited for."""
        for event in events:
            if self._followed.get((stream, event)) != event.records:
                self._device.wait(stream, event)
                self._followed[stream, event] = event.records

    def _enqueue(self, copies: list[Copy], direction: Direction, stream: Stream, label: str) -> None:
        pinned = [copy for copy in copies if "pageable" not in (copy.dst.kind, copy.src.kind)]
        plain = [copy for copy in copies if "pageable" in (copy.dst.kind, copy.src.kind)]
        if pinned:
            self._device.copy_batch(pinned, stream, label)
        if plain:
            self._staging.move(plain, direction, stream, self._batches, label)

    def _note_issued(self, batch: Batch) -> None:
        now, counts = self._device.now(), self.statistics.by_priority[batch.priority]
        counts.batches += 1
        counts.nbytes += batch.nbytes
        for transfer in batch.transfers:
            transfer.state, transfer.batch = TransferState.ISSUED, batch
            counts.issued += 1
            counts.queued_seconds += now - transfer.submitted
        issued = set(map(id, batch.transfers))
        self._queued = [transfer for transfer in self._queued if id(transfer) not in issued]

    # Waiting

    def wait(self, stream: Stream, transfer: Transfer) -> None:
        """Later ops of the stream come after the transfer; it is issued now if it was still queued."""
        batch = self._issued_batch(transfer)
        if batch is None:
            return
        key = stream, batch.stream
        if self._waited.get(key, 0) < batch.number:
            self._device.wait(stream, batch.event)
            self._waited[key] = batch.number

    def events_of(self, transfer: Transfer) -> list[Event]:
        """For `after` of others: what is reached when the transfer is done. It is issued if it was queued.

        Empty when it is DONE. Submit what comes after it before the queue is polled again: the event may then
        get a new point, for which nobody need wait.
        """
        batch = self._issued_batch(transfer)
        return [] if batch is None else [batch.event]

    def finish(self, transfer: Transfer) -> None:
        """The host waits until the transfer is DONE; it is issued now if it was still queued."""
        batch = self._issued_batch(transfer)
        if batch is not None:
            self._device.sync(batch.event)
            self._retire_up_to(batch)

    def poll(self) -> None:
        """Mark as DONE what the device has finished."""
        for batches in self._under_way.values():
            while batches and self._device.query(batches[0].event):
                self._retire_up_to(batches[0])

    def drain(self) -> None:
        """Issue everything that is queued, whatever its priority, and wait for all of it."""
        for transfer in list(self._queued):
            self.raise_priority(transfer, Priority.NOW)
        self.pump()
        for batches in self._under_way.values():
            if batches:
                self.finish(batches[-1].transfers[0])

    def _issued_batch(self, transfer: Transfer) -> Batch | None:
        """The batch under way of a transfer, issued if need be; None when the transfer is DONE."""
        if transfer.state is TransferState.CANCELLED:
            raise DeviceError(
                f"a transfer for layer {transfer.layer} is waited for after it was cancelled",
                remedy="submit it again",
            )
        if transfer.state is TransferState.QUEUED:
            self.raise_priority(transfer, Priority.NOW)
            urgent = [t for t in self._queued if t.priority is Priority.NOW and t.layer == transfer.layer]
            self._issue([t for t in urgent if t.direction == transfer.direction])
        return transfer.batch

    def _retire_up_to(self, batch: Batch) -> None:
        """The host knows that this batch is done, and with it all before it on its stream."""
        batches = self._under_way[batch.stream]
        while batches and batches[0].number <= batch.number:
            done = batches.popleft()
            self._staging.settle(done.number)
            for transfer in done.transfers:
                transfer.state, transfer.batch = TransferState.DONE, None
            self._spare_events.append(done.event)

    # Accounts

    @property
    def queued(self) -> int:
        """Transfers that were not issued."""
        return len(self._queued)

    def bytes_under_way(self, priority: Priority) -> int:
        """Bytes that were issued and are not known to be done."""
        batches = (batch for queue in self._under_way.values() for batch in queue)
        return sum(batch.nbytes for batch in batches if batch.priority is priority)

    def check_integrity(self) -> None:
        """Every transfer is where its state says, and speculation keeps its bound (AssertionError)."""
        for transfer in self._queued:
            if transfer.state is not TransferState.QUEUED or transfer.batch is not None:
                raise AssertionError(f"a queued transfer is {transfer.state.value}")
        for stream, batches in self._under_way.items():
            numbers = [batch.number for batch in batches]
            if numbers != sorted(numbers):
                raise AssertionError(f"batches {numbers} of stream '{stream.name}' are out of order")
            if any(
                t.state is not TransferState.ISSUED or t.batch is not b for b in batches for t in b.transfers
            ):
                raise AssertionError(f"a transfer under way on stream '{stream.name}' is not issued")
        counts = self.statistics.by_priority.values()
        gone = sum(count.issued + count.cancelled for count in counts)
        if sum(count.submitted for count in counts) != gone + len(self._queued):
            raise AssertionError(f"{gone} issued or cancelled and {len(self._queued)} queued do not add up")
        if any(self._speculative_batches(direction) > 1 for direction in DIRECTIONS):
            raise AssertionError("more than one speculative batch is under way in one direction")
