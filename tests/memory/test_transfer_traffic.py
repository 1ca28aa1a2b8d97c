"""Random traffic through the transfer queue: every expert ends where it belongs."""

from __future__ import annotations

import random

from transfer_bench import SIZE, Bench

from strata.device.base import Copy, Event, Launch, Stream, Work
from strata.device.emulated_memory import POISON
from strata.device.python_kernel import PythonKernel
from strata.memory.transfer import Priority, Transfer, TransferState


class RandomTraffic:
    """Submits, cancels, waits and kernels at random; a slot is used again when its transfer is over.

    `holds` is what each slot must contain in the end; kernels look whether it is there when they run.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        options = {
            "depth": self.rng.randint(0, 2),
            "speculative_bytes": self.rng.choice((1, 250, 1000)),
            "staging_bytes": self.rng.choice((64, 256, 1024)),
        }
        self.bench = Bench(seed=seed, **options)
        self.plain = self.bench.device.host_pageable(self.bench.data, "plain")
        self.streams: list[Stream] = [self.bench.compute, self.bench.device.stream("second")]
        self.loading: dict[int, tuple[Transfer, int]] = {}
        self.last_use: dict[int, tuple[Event, ...]] = {}
        self.holds = [POISON] * 40

    def submit(self) -> None:
        slot, value = self.rng.randrange(40), self.rng.randrange(40)
        if slot in self.loading:
            return
        source = self.rng.choice((self.bench.host, self.plain)).slice(value * SIZE, SIZE)
        layer = self.bench.queue.layer + self.rng.randint(0, 4)
        copies = [Copy(self.bench.slot(slot), source)]
        priority = self.rng.choice(list(Priority))
        transfer = self.bench.queue.submit(copies, priority, layer, self.last_use.pop(slot, ()))
        self.loading[slot] = transfer, value

    def settle(self) -> None:
        """What is done is in its slot."""
        for slot, (transfer, value) in list(self.loading.items()):
            if transfer.state is TransferState.DONE:
                self.holds[slot] = value
                del self.loading[slot]

    def pick(self) -> int | None:
        return self.rng.choice(list(self.loading)) if self.loading else None

    def cancel(self) -> None:
        slot = self.pick()
        if slot is not None:
            transfer = self.loading[slot][0]
            if self.bench.queue.cancel(transfer):
                del self.loading[slot]
                self.last_use[slot] = transfer.after

    def raise_priority(self) -> None:
        slot = self.pick()
        if slot is not None:
            self.bench.queue.raise_priority(self.loading[slot][0], self.rng.choice(list(Priority)))

    def finish(self) -> None:
        slot = self.pick()
        if slot is not None:
            self.bench.queue.finish(self.loading[slot][0])

    def use(self) -> None:
        """A kernel reads a slot, loading or loaded, and checks what is there."""
        slot, stream = self.rng.randrange(40), self.rng.choice(self.streams)
        value = self.holds[slot]
        if slot in self.loading:
            transfer, value = self.loading[slot]
            self.bench.queue.wait(stream, transfer)

        def look(reads, writes, slot=slot, value=value):  # type: ignore[no-untyped-def]
            assert (reads[0] == value).all(), f"slot {slot} holds {reads[0][0]}, not {value}"

        device, event = self.bench.device, self.bench.device.event()
        device.launch(Launch(PythonKernel("look", look), (self.bench.slot(slot),), work=Work(500)), stream)
        device.record(event, stream)
        self.last_use[slot] = (*self.last_use.get(slot, ()), event)

    def run(self, steps: int) -> None:
        queue = self.bench.queue
        actions = [self.submit] * 5 + [self.use] * 3 + [self.cancel, self.raise_priority, self.finish]
        actions += [queue.pump, queue.poll, lambda: queue.begin_layer(queue.layer + 1)]
        for _ in range(steps):
            self.rng.choice(actions)()
            self.settle()
            queue.check_integrity()
        queue.drain()
        self.settle()
        assert not self.loading
        assert self.bench.contents() == self.holds


def test_random_traffic_puts_every_expert_where_it_belongs() -> None:
    for seed in range(150):
        RandomTraffic(seed).run(60)
