"""A device with a transfer queue and memory to copy, for the tests of transfers."""

from __future__ import annotations

import numpy as np
from device_figures import ROUND

from strata.device.base import Buffer, Copy, Event
from strata.device.emulated import EmulatedDevice
from strata.device.timeline import Timeline
from strata.memory.transfer import Priority, Transfer
from strata.memory.transfers import TransferOptions, TransferQueue

SIZE = 100


class Bench:
    """A device, a queue, 40 slots of SIZE bytes and pinned memory whose slot i is full of i."""

    def __init__(self, seed: int | None = None, **options: int) -> None:
        self.timeline = Timeline()
        self.device = EmulatedDevice(ROUND, seed=seed, timeline=self.timeline)
        self.slots = self.device.alloc(40 * SIZE, "slots")
        self.data = np.repeat(np.arange(40, dtype=np.uint8), SIZE)
        self.host = self.device.host_register(self.data, "experts")
        self.compute = self.device.stream("compute")
        self.queue = TransferQueue(self.device, TransferOptions(**options))

    def slot(self, index: int) -> Buffer:
        return self.slots.slice(index * SIZE, SIZE)

    def fetch(
        self, index: int, priority: Priority, layer: int = 0, after: tuple[Event, ...] = ()
    ) -> Transfer:
        copies = [Copy(self.slot(index), self.host.slice(index * SIZE, SIZE))]
        return self.queue.submit(copies, priority, layer, after)

    def contents(self) -> list[int]:
        """What each slot holds; the first byte stands for all."""
        self.device.sync()
        out = self.device.host_alloc(40 * SIZE, "out")
        self.device.copy(out, self.slots, self.compute)
        self.device.sync()
        rows = self.device.host_read(out).reshape(40, SIZE)
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].tolist()

    def ops(self, lane: str = "h2d") -> list[tuple[str, str]]:
        return [(span.name, span.details["op"]) for span in self.timeline.spans(lane)]
