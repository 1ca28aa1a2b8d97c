"""The transfer queue: what is issued when, what is never written, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_figures import ROUND
from hypothesis import given
from hypothesis import strategies as st
from transfer_bench import SIZE, Bench

from strata.device.base import BufferKindError, Copy, DeviceError, Launch, Work
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_memory import POISON
from strata.device.python_kernel import PythonKernel
from strata.errors import CapacityError
from strata.memory.staging import _loads
from strata.memory.transfer import Priority, TransferState

NOTHING = PythonKernel("nothing", lambda reads, writes: None)


def test_transfers_of_a_layer_cross_as_one_batch() -> None:
    bench = Bench()
    transfers = [bench.fetch(index, Priority.NEXT, layer=1) for index in (3, 5, 9)]
    assert bench.ops() == []
    bench.queue.pump()
    assert bench.ops() == [("layer 1", "h2d batch of 3")]
    assert {transfer.state for transfer in transfers} == {TransferState.ISSUED}
    counts = bench.queue.statistics.by_priority[Priority.NEXT]
    assert (counts.submitted, counts.issued, counts.batches, counts.nbytes) == (3, 3, 1, 3 * SIZE)
    assert bench.queue.bytes_under_way(Priority.NEXT) == 3 * SIZE
    bench.queue.finish(transfers[0])
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    assert bench.queue.bytes_under_way(Priority.NEXT) == 0
    contents = bench.contents()
    assert [contents[i] for i in (3, 5, 9)] == [3, 5, 9]
    assert contents.count(POISON) == 37


def test_what_is_needed_first_is_issued_first() -> None:
    bench = Bench(depth=3)
    bench.fetch(0, Priority.SPECULATIVE, layer=1)
    bench.fetch(1, Priority.NEXT, layer=2)
    bench.fetch(2, Priority.NEXT, layer=1)
    bench.fetch(3, Priority.NOW, layer=0)
    bench.queue.pump()
    assert [name for name, _ in bench.ops()] == ["layer 0", "layer 1", "layer 2", "layer 1"]


def test_layers_are_fetched_only_so_far_ahead() -> None:
    for depth in (0, 1, 2):
        bench = Bench(depth=depth)
        transfers = [bench.fetch(layer, Priority.NEXT, layer) for layer in range(5)]
        for layer in range(5):
            bench.queue.begin_layer(layer)
            issued = [transfer.state is not TransferState.QUEUED for transfer in transfers]
            assert issued == [index <= layer + depth for index in range(5)]


def test_a_cancelled_transfer_never_writes_and_an_issued_one_is_not_cancelled() -> None:
    bench = Bench(seed=3)
    first, second = bench.fetch(1, Priority.NEXT, layer=5), bench.fetch(2, Priority.NEXT, layer=0)
    bench.queue.pump()
    assert bench.queue.cancel(first)
    assert not bench.queue.cancel(first)
    assert not bench.queue.cancel(second)
    bench.queue.begin_layer(5)
    bench.queue.drain()
    assert not bench.queue.cancel(second)
    assert (first.state, second.state) == (TransferState.CANCELLED, TransferState.DONE)
    contents = bench.contents()
    assert (contents[1], contents[2]) == (POISON, 2)
    assert bench.queue.statistics.by_priority[Priority.NEXT].cancelled == 1
    for call in (lambda: bench.queue.wait(bench.compute, first), lambda: bench.queue.finish(first)):
        with pytest.raises(DeviceError, match="layer 5 is waited for after it was cancelled"):
            call()


def test_speculation_that_was_not_issued_can_be_cancelled() -> None:
    bench = Bench(speculative_bytes=SIZE)
    guesses = [bench.fetch(index, Priority.SPECULATIVE) for index in range(3)]
    needed = bench.fetch(7, Priority.NEXT, layer=9)
    bench.queue.pump()
    assert [bench.queue.cancel(guess) for guess in guesses] == [False, True, True]
    assert needed.state is TransferState.QUEUED
    bench.queue.check_integrity()


def test_a_guess_that_comes_true_becomes_urgent() -> None:
    bench = Bench(speculative_bytes=SIZE)
    guesses = [bench.fetch(index, Priority.SPECULATIVE, layer=4) for index in range(3)]
    bench.queue.pump()
    assert [guess.state is TransferState.QUEUED for guess in guesses] == [False, True, True]
    bench.queue.raise_priority(guesses[2], Priority.NOW)
    bench.queue.raise_priority(guesses[2], Priority.NEXT)
    bench.queue.raise_priority(guesses[0], Priority.NOW)
    assert [guess.priority for guess in guesses] == [Priority.SPECULATIVE, Priority.SPECULATIVE, Priority.NOW]
    bench.queue.pump()
    assert guesses[2].state is TransferState.ISSUED
    counts = bench.queue.statistics.by_priority
    assert (counts[Priority.SPECULATIVE].raised, counts[Priority.NOW].issued) == (1, 1)
    bench.queue.check_integrity()


def test_waiting_for_a_queued_transfer_issues_it_with_what_is_as_urgent() -> None:
    bench = Bench()
    later = bench.fetch(1, Priority.NEXT, layer=8)
    beside = bench.fetch(2, Priority.NOW, layer=8)
    other = bench.fetch(3, Priority.NEXT, layer=9)
    bench.queue.wait(bench.compute, later)
    assert (later.state, beside.state, other.state) == (*[TransferState.ISSUED] * 2, TransferState.QUEUED)
    assert bench.ops() == [("layer 8", "h2d batch of 2")]
    bench.device.launch(Launch(NOTHING, reads=(bench.slot(1), bench.slot(2))), bench.compute)


def test_speculation_is_bounded_so_that_urgent_transfers_wait_for_one_batch_at_most() -> None:
    """Bytes cost a nanosecond: a batch of two guesses keeps the bus for 10 + 2 + 0.2 us."""
    bench = Bench(speculative_bytes=2 * SIZE)
    for index in range(12):
        bench.fetch(index, Priority.SPECULATIVE, layer=index // 4)
    for index in range(12, 18):
        bench.queue.pump()
        assert 0 < bench.queue.bytes_under_way(Priority.SPECULATIVE) <= 2 * SIZE
        urgent = bench.fetch(index, Priority.NOW)
        asked = bench.device.now()
        bench.queue.pump()
        bench.queue.finish(urgent)
        assert bench.device.now() - asked <= 12.2e-6 + 11.1e-6 + 1e-9
        bench.queue.check_integrity()
    assert [op for _, op in bench.ops() if "of 2" in op] == ["h2d batch of 2"] * 6


def test_a_single_guess_larger_than_the_bound_still_crosses() -> None:
    bench = Bench(speculative_bytes=1)
    guesses = [bench.fetch(index, Priority.SPECULATIVE) for index in range(2)]
    bench.queue.pump()
    assert [guess.state for guess in guesses] == [TransferState.ISSUED, TransferState.QUEUED]


def test_consumers_wait_for_their_layer_only() -> None:
    bench = Bench(depth=2)
    layers = [[bench.fetch(layer * 10 + i, Priority.NEXT, layer) for i in range(10)] for layer in range(3)]
    bench.queue.begin_layer(0)
    for transfer in layers[0]:
        bench.queue.wait(bench.compute, transfer)
    bench.device.launch(Launch(NOTHING, reads=(bench.slots.slice(0, 1000),)), bench.compute)
    copies, [kernel] = bench.timeline.spans("h2d"), bench.timeline.spans("compute")
    assert kernel.start == copies[0].end
    assert kernel.start < copies[1].end
    assert bench.device.order.redundant_waits == 0, "ten transfers of one batch need one wait"


def test_a_fetch_that_waits_for_its_slot_does_not_hold_up_an_urgent_one() -> None:
    bench = Bench()
    free = bench.device.event()
    launch = Launch(NOTHING, reads=(bench.slot(0),), work=Work(nbytes=1_000_000))
    bench.device.launch(launch, bench.compute)
    bench.device.record(free, bench.compute)
    ahead = bench.fetch(0, Priority.NEXT, layer=1, after=(free,))
    bench.queue.pump()
    bench.queue.finish(bench.fetch(1, Priority.NOW))
    assert bench.device.now() < 100e-6
    bench.queue.finish(ahead)
    assert bench.device.now() > 1000e-6


def test_events_are_used_again() -> None:
    bench = Bench()
    made = []
    make_event = bench.device.event
    bench.device.event = lambda timing=False: made.append(1) or make_event(timing)  # type: ignore[method-assign]
    for step in range(50):
        bench.queue.finish(bench.fetch(step % 40, Priority.NOW))
    assert len(made) == 1


def test_an_event_is_waited_for_once_per_stream_and_point() -> None:
    bench = Bench()
    free = bench.device.event()
    for index in range(3):
        bench.device.launch(Launch(NOTHING, reads=(bench.slot(39),)), bench.compute)
        bench.device.record(free, bench.compute)
        bench.fetch(2 * index, Priority.NEXT, layer=0, after=(free, free))
        bench.fetch(2 * index + 1, Priority.NEXT, layer=1, after=(free,))
        bench.queue.pump()
        bench.device.sync(bench.compute)
    assert bench.device.order.redundant_waits == 0


@pytest.mark.parametrize("pinned", [True, False])
def test_results_come_back_to_the_host(pinned: bool) -> None:
    for seed in (None, 1, 2, 3):
        bench = Bench(seed=seed, staging_bytes=256)
        result = np.zeros(10 * SIZE, np.uint8)
        register = bench.device.host_register if pinned else bench.device.host_pageable
        out, made = register(result, "result"), bench.device.event()
        bench.device.fill(bench.slots, 8, bench.compute)
        bench.device.record(made, bench.compute)
        copies = [Copy(out, bench.slots.slice(500, 10 * SIZE))]
        transfer = bench.queue.submit(copies, Priority.NOW, 0, after=[made])
        bench.queue.pump()
        bench.queue.finish(transfer)
        assert bench.device.host_read(out).tolist() == [8] * 10 * SIZE
        assert bench.queue.statistics.staged_bytes == (0 if pinned else 10 * SIZE)


def test_plain_memory_crosses_through_the_staging_buffers() -> None:
    for seed in (None, 1, 2, 3):
        bench = Bench(seed=seed, staging_bytes=256)
        plain = bench.device.host_pageable(bench.data, "plain")
        copies = [Copy(bench.slot(i), plain.slice(i * SIZE, SIZE)) for i in range(20)]
        transfers = [bench.queue.submit([copy], Priority.NOW, 0) for copy in copies]
        bench.queue.pump()
        for transfer in transfers:
            bench.queue.wait(bench.compute, transfer)
        assert bench.contents() == [*range(20), *[POISON] * 20]
        assert bench.queue.statistics.staged_bytes == 20 * SIZE
        assert bench.queue.statistics.staging_waits > 0


def test_the_host_fills_one_staging_buffer_while_the_other_is_on_the_bus() -> None:
    bench = Bench(staging_bytes=10 * SIZE)
    plain = bench.device.host_pageable(bench.data, "plain")
    bench.queue.submit([Copy(bench.slots, plain)], Priority.NOW, 0)
    bench.queue.pump()
    fills, copies = bench.timeline.spans("host", lambda s: s.name == "host copy"), bench.timeline.spans("h2d")
    assert len(fills) == len(copies) == 4
    assert fills[1].start < copies[0].end, "the second fill does not wait for the first copy"
    assert fills[2].start >= copies[0].end, "the third uses the first buffer again"


def test_plain_memory_without_staging_is_refused() -> None:
    bench = Bench()
    plain = bench.device.host_pageable(bench.data, "plain")
    bench.queue.submit([Copy(bench.slot(0), plain.slice(0, SIZE))], Priority.NOW, 0)
    with pytest.raises(CapacityError, match="not page-locked, and there are 0 staging bytes"):
        bench.queue.pump()


def test_a_transfer_goes_one_way() -> None:
    bench = Bench()
    up = Copy(bench.slot(0), bench.host.slice(0, SIZE))
    down = Copy(bench.host.slice(SIZE, SIZE), bench.slot(1))
    inside = Copy(bench.slot(2), bench.slot(3))
    for copies in ([], [up, down], [inside]):
        with pytest.raises(BufferKindError, match="does not go one way"):
            bench.queue.submit(copies, Priority.NOW, 0)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 2000))
def test_loads_of_a_staging_buffer_cover_every_byte_once(sizes: list[int], capacity: int) -> None:
    device = EmulatedDevice(replace(ROUND, memory_bytes=1 << 20), with_data=False)
    copies = [
        Copy(device.alloc(size, f"{i}"), device.host_alloc(size, f"{i}")) for i, size in enumerate(sizes)
    ]
    covered = {copy.dst.allocation.name: 0 for copy in copies}
    for load in _loads(copies, capacity):
        assert load
        used = 0
        for piece, offset in load:
            assert offset >= used
            assert offset % 256 == 0
            used = offset + piece.dst.nbytes
            assert used <= capacity
            name = piece.dst.allocation.name
            assert (piece.src.allocation.name, piece.src.offset, piece.src.nbytes) == (
                name,
                piece.dst.offset,
                piece.dst.nbytes,
            )
            assert piece.dst.offset == covered[name]
            covered[name] += piece.dst.nbytes
    assert list(covered.values()) == sizes


@pytest.mark.parametrize("damage", ["state", "lost", "batch"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    bench = Bench()
    issued = bench.fetch(0, Priority.NOW)
    bench.queue.pump()
    queued = bench.fetch(1, Priority.NEXT, layer=9)
    bench.queue.check_integrity()
    if damage == "state":
        queued.state = TransferState.DONE
    elif damage == "lost":
        bench.queue._queued.clear()
    else:
        issued.batch = None
    with pytest.raises(AssertionError):
        bench.queue.check_integrity()
