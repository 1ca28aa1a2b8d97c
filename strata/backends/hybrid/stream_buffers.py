"""Reserved buffers for experts that get no slot: some are computed from while the others fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.backends.hybrid.expert_source import ExpertSource
from strata.core import ExpertId
from strata.device.base import Buffer, Copy, Device, Stream
from strata.memory.regions import Arena
from strata.memory.transfer import Priority, Transfer
from strata.memory.transfers import TransferQueue


@dataclass(eq=False)
class StreamLoad:
    """Experts that lie, or will lie, in one of the buffers: each at its place in `records`."""

    buffer: int
    experts: tuple[ExpertId, ...]
    records: tuple[Buffer, ...]
    transfer: Transfer


class StreamBuffers:
    """A ring: load, wait, use, release, in the same order. The memory is the workspace's, taken for good.

    count: buffers, two at least; experts: how many go into one.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        queue: TransferQueue,
        source: ExpertSource,
        workspace: Arena,
        slot_bytes: int,
        count: int,
        experts: int,
    ) -> None:
        self._device = device
        self._compute = compute
        self._queue = queue
        self._source = source
        self.experts = experts
        self._places = [
            [workspace.take(slot_bytes, "stream buffers") for _ in range(experts)] for _ in range(count)
        ]
        self._released = [device.event() for _ in range(count)]
        self._loads: list[StreamLoad | None] = [None] * count
        self._turn = 0

    @property
    def free(self) -> int:
        """Buffers that may be loaded now."""
        return self._loads.count(None)

    def load(self, experts: Sequence[ExpertId], priority: Priority, due: int) -> StreamLoad:
        """Queue copies of at most `self.experts` experts into the buffer that was released first."""
        turn = self._turn
        assert self._loads[turn] is None and 0 < len(experts) <= self.experts
        loan = self._source.lend(experts, passing=True)
        sources = loan.records
        records = [place.slice(0, s.nbytes) for place, s in zip(self._places[turn], sources, strict=False)]
        copies = [Copy(record, source) for record, source in zip(records, sources, strict=True)]
        released = self._released[turn]
        transfer = self._queue.submit(copies, priority, due, [released] if released.recorded else [])
        self._source.bind(loan, transfer)
        load = self._loads[turn] = StreamLoad(turn, tuple(experts), tuple(records), transfer)
        self._turn = (turn + 1) % len(self._loads)
        return load

    def wait(self, load: StreamLoad) -> None:
        """Launches that come next find the experts there."""
        self._queue.wait(self._compute, load.transfer)

    def release(self, load: StreamLoad) -> None:
        """The last launch that reads the load was made."""
        self._device.record(self._released[load.buffer], self._compute)
        self._loads[load.buffer] = None

    def reset(self) -> None:
        """Drop what is loaded: nobody will use it (a pass that failed, a guess that was wrong)."""
        oldest_first = self._loads[self._turn :] + self._loads[: self._turn]
        for load in oldest_first:
            if load is not None:
                self.drop(load)

    def drop(self, load: StreamLoad) -> None:
        """Give the buffer back without having used it; what was not issued never crosses."""
        if self._queue.cancel(load.transfer):
            self._loads[load.buffer] = None
            return
        self.wait(load)  # the next load may cross on another stream and must come after this one
        self.release(load)
