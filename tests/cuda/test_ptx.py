"""The PTX that NVRTC made of every kernel, executed on numpy: the emulator's cases and expectations.

The same runs are profiled: bank conflicts of shared memory, and the sectors that weights and KV pages cost.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import Case
from compiled import ptx_of
from ptxsim.parse import PtxError
from ptxsim.profile import SECTOR, Profile
from ptxsim.simulator import PtxSimulator
from runners import Call, read_only, source_of
from test_kernels import ALL

from strata.backends.cuda.sources import kernel_names

ALLOWED = 1.1
"""Times the ideal, for conflicts and for sectors."""


@pytest.mark.parametrize("case", [case for case in ALL if case.ptx], ids=str)
def test_ptx(case: Case) -> None:
    prepared, profile = case.make(), Profile()
    PtxSimulator(ptx_of(case.file)).run(prepared.call, profile)
    prepared.check()
    if case.file not in kernel_names():
        return
    assert profile.conflicts <= ALLOWED, profile.worst_lines()
    for arguments, nbytes in prepared.streams.items():
        moved = sum(profile.sectors.get(argument, 0) for argument in arguments) * SECTOR
        assert moved <= ALLOWED * nbytes, f"arguments {arguments}: {moved} bytes moved for {nbytes}"


# What the simulation sees of the emulator's planted defects (it has no races).
PLANTED = {
    "write_beyond_the_end": "out of bounds: argument 0 at offset 512",
    "shared_beyond_the_end": "shared memory out of bounds",
    "uninitialised_shared": "uninitialised",
    "shuffle_in_a_branch": "divergent",
    "misaligned_vector": "misaligned",
    "copy_left_at_exit": "never waited for",
}


@pytest.mark.parametrize("entry", PLANTED)
def test_planted_defects_are_reported(entry: str) -> None:
    copies = "copy" in entry
    call = Call("planted", entry, (1,), 32 if copies else 128, 512, (np.zeros(128, np.float32),))
    with pytest.raises(PtxError, match=PLANTED[entry]):
        PtxSimulator(ptx_of("planted")).run(call)


def test_a_copy_that_is_not_waited_for_brings_nothing() -> None:
    data = np.zeros(256, np.float32)
    PtxSimulator(ptx_of("planted")).run(Call("planted", "copy_not_waited_for", (1,), 32, 512, (data,)))
    assert np.isnan(data[128:160]).all()


def test_writes_to_inputs_are_reported() -> None:
    arrays = read_only(np.zeros(128)), np.zeros(128, np.float32)
    call = Call("planted", "write_to_input", (1,), 128, 0, arrays)
    with pytest.raises(PtxError, match="read-only argument 0"):
        PtxSimulator(ptx_of("planted")).run(call)


@pytest.mark.parametrize(
    ("entry", "conflicts", "sectors"),
    [("stride_1", 1.0, 16), ("stride_2", 2.0, 32), ("stride_32", 32.0, 128), ("vectors_row_4", 1.0, 64)],
)
def test_costs_of_known_patterns(entry: str, conflicts: float, sectors: int) -> None:
    """128 threads; the shared and the global pattern are the same."""
    profile = Profile()
    data = np.zeros(128 * 32, np.float32)
    PtxSimulator(ptx_of("patterns")).run(Call("patterns", entry, (1,), 128, data.nbytes, (data,)), profile)
    assert (profile.conflicts, profile.sectors) == (conflicts, {0: sectors})


def test_errors_name_the_source_line() -> None:
    call = Call("planted", "write_beyond_the_end", (1,), 128, 0, (np.zeros(128, np.float32),))
    with pytest.raises(PtxError) as error:
        PtxSimulator(ptx_of("planted")).run(call)
    (line,) = re.findall(r"planted\.cu:(\d+)", str(error.value))
    assert "threadIdx.x + 1] = 1.0f" in source_of("planted").text.splitlines()[int(line) - 1]
