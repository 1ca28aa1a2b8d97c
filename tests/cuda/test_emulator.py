"""Every check of the emulator is shown to fire, in every order of threads, and to stay silent otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from runners import Call, EmulatedRunner, read_only

from strata.backends.cuda.emulator import ORDERS, EmulatorError, Order

RACE = "race: "
# kernel: what the report says
PLANTED = {
    "race_between_warps": RACE + "|uninitialised",
    "race_inside_a_warp": RACE + "|uninitialised",
    "shuffle_is_no_barrier": RACE + "read",
    "syncwarp_is_no_block_barrier": RACE + "|uninitialised",
    "write_after_read": RACE,
    "write_after_many_reads": RACE + "write .* after a read",
    "same_value_by_all": RACE + "write .* after a write",
    "write_beyond_the_end": "out of bounds: write of 4 bytes at 'argument 0'",
    "read_before_the_begin": "out of bounds: read of 4 bytes",
    "shared_beyond_the_end": "out of bounds: write of shared memory",
    "local_array_beyond_the_end": "out of bounds: index of a local array",
    "barrier_in_a_branch": "deadlock .* 32 threads at a barrier",
    "barriers_at_two_places": "divergent barrier",
    "return_before_a_barrier": "deadlock .* 127 threads at a barrier, 0 in a collective, 1 have exited",
    "shuffle_in_a_branch": "deadlock .* in a collective",
    "shuffles_at_two_places": "divergent collective",
    "mask_of_half_a_warp": "only full warps",
    "uninitialised_shared": "uninitialised",
    "read_of_another_block": RACE + ".*another block",
    "write_under_a_reader_of_another_block": RACE + ".*another block",
    "sum_without_atomics": RACE,
    "read_beside_atomics": RACE + "|no barrier",
    **dict.fromkeys(
        (
            "last_block_without_a_fence",
            "last_block_without_a_fence_behind",
            "last_block_without_a_barrier",
            "last_block_of_another_ticket",
        ),
        RACE + ".*another block",
    ),
    "misaligned_vector": "misaligned",
    "copy_not_waited_for": "before the copy was waited for",
    "copy_waited_for_too_little": "before the copy was waited for",
    "copy_left_at_exit": "never waited for",
    "copy_of_another_thread": "before the copy was waited for|uninitialised|" + RACE,
}
FINE = ("fine_syncwarp", "fine_atomics", "fine_copy", "fine_last_block")


def call_of(entry: str) -> Call:
    copies, blocks = "copy" in entry, 2 if "another_block" in entry or "last_block" in entry else 1
    floats = 256 if copies or blocks == 2 else 128
    return Call("planted", entry, (blocks,), 32 if copies else 128, 512, (np.zeros(floats, np.float32),))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", PLANTED)
def test_planted_defects_are_reported(entry: str, order: Order) -> None:
    with pytest.raises(EmulatorError, match=PLANTED[entry]) as report:
        EmulatedRunner(order).run(call_of(entry))
    if "deadlock" not in str(report.value) and "divergent" not in str(report.value):
        assert "thread (" in str(report.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry", FINE)
def test_correct_kernels_pass(entry: str, order: Order) -> None:
    EmulatedRunner(order).run(call_of(entry))


def test_writes_to_inputs_are_reported() -> None:
    inputs, data = read_only(np.zeros(128, np.float32)), np.zeros(128, np.float32)
    with pytest.raises(EmulatorError, match="read-only: write to 'argument 0'"):
        EmulatedRunner().run(Call("planted", "write_to_input", (1,), 128, 0, (inputs, data)))


def test_reports_name_file_and_line() -> None:
    with pytest.raises(EmulatorError, match=r"at planted\.cu:\d+"):
        EmulatedRunner().run(call_of("write_beyond_the_end"))


def test_copies_bring_their_data_and_zeros_where_invalid() -> None:
    data = np.arange(256, dtype=np.float32)
    EmulatedRunner().run(Call("planted", "fine_copy", (1,), 32, 512, (data,)))
    source = np.arange(0, 128, 4).reshape(16, 2)[:, ::-1].ravel()
    source[30] = 0.0  # thread 31's copy was invalid and thread 30 reads it
    np.testing.assert_array_equal(data[128:160], source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "absent"}, "no kernel 'absent'"),
        ({"arguments": ()}, "takes 1 arguments, not 0"),
        ({"block": 48}, "48 threads"),
        ({"shared_bytes": 100 << 10}, "102400 bytes of shared memory, at most 101376"),
    ],
)
def test_wrong_launches_are_refused(change: dict[str, object], message: str) -> None:
    call = call_of("fine_syncwarp")
    with pytest.raises(EmulatorError, match=message):
        EmulatedRunner().run(Call(**{**vars(call), **change}))
