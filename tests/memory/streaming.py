"""The reference schedule: layers stream through two sets of slots while the layer before them computes.

Written once, for every device: real data and random orders on small sizes, sizes only for timelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.device.base import Buffer, Copy, Device, Event, Launch, Stream, Work
from strata.device.python_kernel import PythonKernel, Views
from strata.memory.regions import DeviceRegion, RegionSizes
from strata.memory.transfer import Priority, Transfer
from strata.memory.transfers import TransferOptions, TransferQueue

HIDDEN = 32  # bytes


@dataclass(frozen=True)
class Shape:
    """A model that is nothing but experts. macs: of one expert for all tokens of the chunk."""

    layers: int
    experts: int
    record_bytes: int
    macs: int = 0
    pinned: bool = True
    out_pinned: bool = True

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.record_bytes


def mix(reads: Views, writes: Views) -> None:
    """hidden = 3 * hidden + a sum over each expert's record, modulo 256, experts in order."""
    hidden, *experts = reads
    result = hidden.astype(np.int64)
    for index, expert in enumerate(experts):
        result = 3 * result + (index + 1) * int(expert.sum()) + int(expert[-1])
    writes[0][:] = (result % 256).astype(np.uint8)


class StreamingRun:
    """Owns what one pass over all layers needs; `run` gives the hidden state, None without data."""

    def __init__(
        self, device: Device, shape: Shape, records: NDArray[np.uint8], options: TransferOptions
    ) -> None:
        self.device = device
        self.shape = shape
        slots = 2 * shape.experts
        shared = slots * -(-shape.record_bytes // 256) * 256
        sizes = RegionSizes(256, shared, 0, shape.record_bytes, 256)
        self.region = DeviceRegion(device, sizes, slots)
        self.hidden = self.region.static.take(HIDDEN, "hidden state")
        self.records = records
        self.queue = TransferQueue(device, options)
        self.compute: Stream = device.stream("compute")
        self.free: list[Event] = [device.event(), device.event()]
        self.fetches: dict[int, list[Transfer]] = {}

    def slot(self, layer: int, expert: int) -> Buffer:
        return self.region.slot(layer % 2 * self.shape.experts + expert)

    def fetch(self, layer: int) -> None:
        """Queue the copies of a layer; its slots are free once the layer two before it has computed."""
        if layer >= self.shape.layers:
            return
        size = self.shape.record_bytes
        after = [self.free[layer % 2]] if layer >= 2 else []
        self.fetches[layer] = [
            self.queue.submit([self._record_copy(layer, expert, size)], Priority.NEXT, layer, after)
            for expert in range(self.shape.experts)
        ]

    def _record_copy(self, layer: int, expert: int, size: int) -> Copy:
        source = self.records.slice((layer * self.shape.experts + expert) * size, size)
        return Copy(self.slot(layer, expert), source)

    def layer(self, layer: int) -> None:
        """Issue one layer: the next one's copies, the wait for its own, the kernel."""
        self.fetch(layer + 1)
        self.queue.begin_layer(layer)
        for transfer in self.fetches.pop(layer):
            self.queue.wait(self.compute, transfer)
        slots = tuple(self.slot(layer, expert) for expert in range(self.shape.experts))
        work = Work(self.shape.layer_bytes, self.shape.experts * self.shape.macs)
        kernel = PythonKernel("experts", mix)
        reads = (self.hidden, *slots)
        self.device.launch(Launch(kernel, reads, (self.hidden,), work, label=f"layer {layer}"), self.compute)
        self.device.record(self.free[layer % 2], self.compute)

    def run(self, start: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """start: u8 [HIDDEN] -> u8 [HIDDEN], up and down through the queue."""
        source = self.device.host_register(start, "start")
        begin = self.queue.submit([Copy(self.hidden, source)], Priority.NOW, 0)
        self.fetch(0)
        self.queue.begin_layer(0)
        self.queue.wait(self.compute, begin)
        for layer in range(self.shape.layers):
            self.layer(layer)
        result = np.zeros(HIDDEN, np.uint8)
        register = self.device.host_register if self.shape.out_pinned else self.device.host_pageable
        out = register(result, "result")
        last = self.free[(self.shape.layers - 1) % 2]
        down = self.queue.submit([Copy(out, self.hidden)], Priority.NOW, self.shape.layers, [last])
        self.queue.pump()
        self.queue.finish(down)
        self.queue.check_integrity()
        return self.device.host_read(out).copy()


def host_memory(device: Device, shape: Shape, records: NDArray[np.uint8]) -> Buffer:
    """The experts' records in page-locked or plain memory, as the shape asks."""
    register = device.host_register if shape.pinned else device.host_pageable
    return register(records, "experts")


def expected(shape: Shape, records: NDArray[np.uint8], start: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same without a device."""
    hidden = start.copy()
    layers = records.reshape(shape.layers, shape.experts, shape.record_bytes)
    for layer in layers:
        mix((hidden, *layer), (hidden,))
    return hidden


def random_case(rng: Any) -> tuple[Shape, NDArray[np.uint8], NDArray[np.uint8], TransferOptions]:
    """A small model, its records, a start, and options that suit it."""
    shape = Shape(
        layers=rng.randint(2, 7),
        experts=rng.randint(1, 3),
        record_bytes=rng.choice((64, 300, 1000)),
        macs=rng.choice((0, 0, 20_000)),
        pinned=rng.random() < 0.7,
        out_pinned=rng.random() < 0.7,
    )
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    records = numbers.integers(0, 256, shape.layers * shape.layer_bytes, dtype=np.uint8)
    start = numbers.integers(0, 256, HIDDEN, dtype=np.uint8)
    options = TransferOptions(depth=rng.randint(1, 2), staging_bytes=rng.choice((128, 700, 4096)))
    return shape, records, start, options
