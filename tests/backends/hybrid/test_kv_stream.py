"""KV pages at the host, streamed layer by layer: the same results, in any order, under the compute."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_figures import ROUND, RTX_3090
from hybrids import FIGURES, CachedStore, Plain, feed_chunks, make_hybrid, tokens
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.kv_stream import StreamedKv
from strata.core import Batch, Sequence
from strata.device.base import Launch, RaceError, Work
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_locks import PageLocks
from strata.device.python_kernel import PythonKernel, Views
from strata.device.timeline import Timeline, hidden_share
from strata.errors import CapacityError
from strata.memory.locked_pieces import LockOptions
from strata.memory.transfer import Priority, Transfer
from strata.memory.transfers import TransferOptions, TransferQueue

SPECS = {"moe": moe_spec(3), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}
CHUNKS = (7, 1, 1, 11, 1, 1, 1)
BOUND = 1e-4


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=1, activations="f32")


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_pages_on_the_device(cpu: CpuBackend, name: str) -> None:
    spec = SPECS[name]
    store = CachedStore(spec)
    wanted = feed_chunks(Plain.make(cpu, store, spec), CHUNKS)
    for seed in range(12):
        hybrid = make_hybrid(cpu, store, spec, seed=seed, kv_tier="host", staged_blocks=3)
        found = feed_chunks(hybrid, CHUNKS)
        hybrid.close()
        assert np.abs(found - wanted).max() < BOUND * wanted.std(), f"seed {seed}"


def test_pages_that_the_driver_does_not_lock_cross_through_staging(cpu: CpuBackend) -> None:
    spec = SPECS["moe"]
    store = CachedStore(spec)
    wanted = feed_chunks(Plain.make(cpu, store, spec), CHUNKS)
    for seed in range(6):
        device = EmulatedDevice(FIGURES, seed=seed, locks=PageLocks(most=0))
        with pytest.warns(RuntimeWarning, match=r"the KV pages .* cannot be page-locked: .* 0 of 0 are"):
            hybrid = make_hybrid(
                cpu, store, spec, device=device, kv_tier="host", staged_blocks=3, locks=LockOptions(None)
            )
        found = feed_chunks(hybrid, CHUNKS)
        hybrid.close()
        assert np.abs(found - wanted).max() < BOUND * wanted.std(), f"seed {seed}"


def test_a_pass_with_more_pages_than_the_buffers_hold_is_refused(cpu: CpuBackend) -> None:
    spec = SPECS["moe"]
    hybrid = make_hybrid(cpu, TinyStore(spec), spec, kv_tier="host", staged_blocks=2)
    hybrid.feed(tokens(16))
    with pytest.raises(CapacityError, match="reads 3 KV pages, the device's buffers hold 2"):
        hybrid.feed([1])


SPEC = KvSpec(5, 1, 8, 8, 8, "bf16")


class Passes:
    """Passes of two requests over streamed pages. Attention is a kernel that checks and adds tokens.

    A token's bytes in every layer are drawn from its request, place and layer; whoever finds others has been
    given another page, or one from before the last write.
    """

    def __init__(self, device: Any, spec: KvSpec = SPEC, pages: int = 8, blocks: int = 6) -> None:
        self.device, self.spec = device, spec
        self.compute = device.stream("compute")
        self.queue = TransferQueue(device, TransferOptions())
        memory = SimpleNamespace(device=device, queue=self.queue, compute=self.compute)
        staging = device.alloc(2 * blocks * spec.layer_bytes, "staging")
        self.kv = StreamedKv(memory, spec, pages, staging, blocks)  # type: ignore[arg-type]
        self.tables = {0: [5, 1, 6], 1: [5, 2, 0]}  # the first page is shared
        self.done = {0: 0, 1: 8}
        self.layer = 0
        self.macs = 0

    def step(self, counts: dict[int, int], layers: int | None = None) -> None:
        """New tokens of the requests, through all layers; or the first few, the last of which fails."""
        sequences, row = [], 0
        for request, count in counts.items():
            pages = np.array(self.tables[request], np.int32)
            sequences.append(Sequence(row, count, self.done[request], pages))
            row += count
        rows = np.arange(row, dtype=np.int32)
        self.kv.addresses(Batch(rows, rows, tuple(sequences), rows[:0]))
        for layer in range(self.spec.layers if layers is None else layers):
            self.queue.begin_layer(self.layer)
            self.layer += 1
            self.kv.begin_layer(layer)
            for request, sequence in zip(counts, sequences, strict=True):
                self._attend(layer, request, sequence)
            if layer + 1 != layers:
                self.kv.end_layer(layer)
        if layers is None:
            for request, count in counts.items():
                self.done[request] += count

    def _attend(self, layer: int, request: int, sequence: Sequence) -> None:
        blocks = self.kv.blocks(layer, sequence)
        old = -(-sequence.start // self.spec.page_tokens)
        first, start, stop = (
            sequence.start // self.spec.page_tokens,
            sequence.start,
            sequence.start + sequence.count,
        )

        def attend(reads: Views, writes: Views) -> None:
            for place in range(start):
                view = reads[place // 8]
                assert view[place % 8] == mark(request, layer, place), f"layer {layer}, place {place}"
            for place in range(start, stop):
                writes[place // 8 - first][place % 8] = mark(request, layer, place)

        launch = Launch(
            PythonKernel("attention", attend),
            tuple(blocks[:old]),
            tuple(blocks[first:]),
            Work(0, self.macs),
            label=f"layer {layer}",
        )
        self.device.launch(launch, self.compute)


def mark(request: int, layer: int, place: int) -> int:
    """The byte that a token leaves in a layer; the first page is that of both requests."""
    return (17 * (request if place >= 8 else 0) + 29 * layer + 7 * place + 1) % 251


def random_passes(device: Any, rng: random.Random, count: int) -> Passes:
    passes = Passes(device)
    passes.step({0: 8})
    for _ in range(count):
        counts = {r: rng.randint(1, 4) for r in (0, 1) if passes.done[r] < 20 and rng.random() < 0.8}
        if counts and rng.random() < 0.2:
            passes.step(counts, layers=rng.randint(0, SPEC.layers))  # it fails and is tried again
        if counts:
            passes.step(counts)
        if rng.random() < 0.2:
            passes.kv.copy_pages([(passes.tables[0][-1], 7)])
            passes.tables[0][-1], freed = 7, passes.tables[0][-1]
            passes.kv.copy_pages([(7, freed)])
            passes.tables[0][-1] = freed
    device.sync()
    passes.queue.check_integrity()
    return passes


def test_three_hundred_random_schedules_give_every_layer_its_own_blocks() -> None:
    for seed in range(300):
        device = EmulatedDevice(ROUND, seed=seed)
        random_passes(device, random.Random(seed), 3)
        device.close()


class Hasty(TransferQueue):
    """Leaves out waits: those of one priority and direction for what must come before them, or of compute."""

    left_out = ""

    def submit(self, copies: Any, priority: Priority, layer: int, after: Any = ()) -> Transfer:
        transfer = super().submit(copies, priority, layer, after)
        kinds = {"return": transfer.direction == "d2h", "fetch": transfer.direction == "h2d"}
        kept = list(transfer.after)
        if kinds.get(self.left_out):
            kept = []
        if self.left_out == "fetch after attention" and kinds["fetch"]:
            kept = kept[1:]
        if self.left_out == "fetch after return" and kinds["fetch"]:
            kept = kept[:1]
        transfer.after = tuple(kept)
        return transfer

    def wait(self, stream: Any, transfer: Transfer) -> None:
        if self.left_out != f"compute after {transfer.direction}":
            super().wait(stream, transfer)


WAITS = [
    "return",
    "fetch",
    "fetch after attention",
    "fetch after return",
    "compute after h2d",
    "compute after d2h",
]


@pytest.mark.parametrize("left_out", WAITS)
def test_no_kind_of_wait_can_be_left_out(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TransferQueue", Hasty)
    monkeypatch.setattr(Hasty, "left_out", left_out)
    for seed in range(40):
        try:
            random_passes(EmulatedDevice(ROUND, seed=seed), random.Random(seed), 3)
        except RaceError:
            return
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("shape", [(48, 4, 128), (46, 8, 128)], ids=["Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_blocks_of_the_next_layer_cross_under_the_compute_of_this_one(shape: tuple[int, int, int]) -> None:
    """4,096 tokens on a 3090. A layer computes half as long as its blocks cross, as long, or longer."""
    layers, heads, dim = shape
    spec = KvSpec(layers, heads, dim, dim, 32, "int8")
    pages = 4096 // 32
    for factor in (0.5, 1.0, 1.5):
        timeline = Timeline()
        device = EmulatedDevice(RTX_3090, timeline=timeline, with_data=False)
        passes = Passes(device, spec, pages, pages)
        passes.tables, passes.done = {0: list(range(pages))}, {0: 4095}
        seconds = pages * spec.layer_bytes / RTX_3090.h2d.bytes_per_s
        passes.macs = int(factor * seconds * RTX_3090.macs_per_s)
        passes.step({0: 1})
        device.sync()
        copies, compute = timeline.spans("h2d"), timeline.spans("compute")
        assert len(copies) == len(compute) == layers
        assert hidden_share(copies[1:], compute) >= 0.9 * min(1, factor)
