"""Page-locking as it turns out to be needed: what is asked of the driver, what is said, what it gains."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from device_figures import ROUND, RTX_3090
from hypothesis import given
from hypothesis import strategies as st

from strata.device.base import Copy
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_locks import PageLocks
from strata.memory.locked_pieces import LockedPieces, LockOptions
from strata.memory.transfer import Priority
from strata.memory.transfers import TransferOptions, TransferQueue

MIB = 1 << 20


def pieces_of(locks: PageLocks, options: LockOptions) -> tuple[EmulatedDevice, LockedPieces]:
    device = EmulatedDevice(ROUND, locks=locks)
    return device, LockedPieces(device, options)


def mapped(nbytes: int, seed: int = 0) -> np.ndarray:
    piece = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    piece.flags.writeable = False
    return piece


def test_a_piece_is_locked_when_it_is_read_again() -> None:
    device, pieces = pieces_of(PageLocks(), LockOptions(after=1))
    piece = mapped(4096)
    kinds = [pieces.buffer(piece, "p").kind for _ in range(3)]
    assert kinds == ["pageable", "pinned", "pinned"]
    assert (pieces.locked, pieces.copied) == (4096, 0)
    pieces.close()
    assert device.locks.held == {} and not device.memory.live


def test_it_may_be_locked_at_once_or_never() -> None:
    for after, kind in ((0, "pinned"), (None, "pageable")):
        device, pieces = pieces_of(PageLocks(), LockOptions(after=after))
        assert {pieces.buffer(mapped(100), "p").kind for _ in range(4)} == {kind}
        pieces.close()
        device.close()


def test_what_is_mapped_read_only_is_copied_where_there_is_room_and_both_numbers_are_told() -> None:
    device, pieces = pieces_of(PageLocks(read_only=False), LockOptions(after=0, copies=250))
    first, second, third = (mapped(100, seed) for seed in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = pieces.buffer(first, "first")
        assert buffer.kind == "pinned" and buffer.address != first.ctypes.data
        assert (device.host_read(buffer) == first).all()
        assert pieces.buffer(second, "second").kind == "pinned"
    with pytest.warns(RuntimeWarning, match="200 B of .*'first' is mapped .* 250 B.*staging"):
        assert pieces.buffer(third, "third").kind == "pageable"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pieces.buffer(mapped(60, 9), "fourth").kind == "pageable"
    pieces.close()


def test_without_room_for_copies_the_drivers_reason_and_remedy_are_told() -> None:
    _, pieces = pieces_of(PageLocks(most=150), LockOptions(after=0))
    assert pieces.buffer(np.zeros(100, np.uint8), "first").kind == "pinned"
    with pytest.warns(RuntimeWarning, match="'second' has 100 .*100 of 150 are .*raise the limit"):
        assert pieces.buffer(np.zeros(100, np.uint8), "second").kind == "pageable"


def test_no_copy_stands_for_bytes_that_change() -> None:
    """Memory that can be written is locked where it lies, or not at all."""
    _, pieces = pieces_of(PageLocks(most=100, read_only=False), LockOptions(after=0, copies=1 << 20))
    assert pieces.buffer(mapped(64), "piece").kind == "pinned"
    place, other = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    found = pieces.buffer(place, "place", changes=True)
    assert found.kind == "pinned" and found.address == place.ctypes.data
    with pytest.warns(RuntimeWarning, match="100 of 100 are page-locked"):
        assert pieces.buffer(other, "other place", changes=True).kind == "pageable"


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 2), st.integers(0, 900))
def test_every_read_finds_the_bytes(reads: list[int], after: int, most: int) -> None:
    device = EmulatedDevice(ROUND, locks=PageLocks(most, read_only=most % 2 == 0))
    pieces = LockedPieces(device, LockOptions(after, copies=most // 2))
    data = [mapped(64 + 32 * i, i) for i in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in reads:
            buffer = pieces.buffer(data[index], str(index))
            assert (device.host_read(buffer) == data[index]).all()
    assert pieces.locked == sum(device.locks.held.values()) <= most
    assert pieces.copied <= most // 2
    pieces.close()
    device.check_integrity()
    assert not device.memory.live


def seconds(locks: PageLocks, options: LockOptions, rounds: int) -> float:
    """Virtual seconds to bring 16 MiB to a 3090 in pieces, the last of some rounds."""
    device = EmulatedDevice(RTX_3090, locks=locks, with_data=False)
    queue = TransferQueue(device, TransferOptions(staging_bytes=4 * MIB))
    pieces, target = LockedPieces(device, options), device.alloc(2 * MIB, "slot")
    data = [np.zeros(2 * MIB, np.uint8) for _ in range(8)]
    for _ in range(rounds):
        begin = device.now()
        for piece in data:
            queue.finish(queue.submit([Copy(target, pieces.buffer(piece, "expert"))], Priority.NOW, 0))
        last = device.now() - begin
    pieces.close()
    return last


def test_locked_memory_crosses_at_the_buss_speed() -> None:
    """12 GB/s; staged it takes the host's copy at 8 GB/s besides. Locking itself costs the second round."""
    rules = {"locks": PageLocks(bytes_per_s=2.5e9)}
    bus, host, lock = (16 * MIB / rate for rate in (12e9, 8e9, 2.5e9))
    staged = seconds(options=LockOptions(None), rounds=3, **rules)
    assert staged == pytest.approx(bus + host, rel=0.1)
    assert seconds(options=LockOptions(1), rounds=2, **rules) == pytest.approx(bus + lock, rel=0.1)
    assert seconds(options=LockOptions(1), rounds=3, **rules) == pytest.approx(bus, rel=0.1)
