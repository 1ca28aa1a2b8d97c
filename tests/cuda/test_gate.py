"""What the compiler may do to a kernel on sm_86: no spills, few registers, room for at least two blocks."""

from __future__ import annotations

import re

import pytest
from cases import Case
from compiled import compiled
from gate import Usage, usage_of
from test_kernels import ALL

from strata.backends.cuda.launch_shapes import MAX_SHARED
from strata.backends.cuda.sources import kernel_names, kernel_source

MAX_REGISTERS, MAX_REGISTERS_OF_PROMPTS = 128, 255
PROMPTS = ("attention_prefill",)
"""Kernels for prompts: they are bound by tensor cores, and the tests below ask for two blocks per SM."""


@pytest.mark.parametrize("file", kernel_names())
def test_no_kernel_spills(file: str) -> None:
    usage = usage_of(compiled(file).log)
    exported = set(re.findall(r"^EXPORT_KERNEL\((\w+)\)", kernel_source(file).text, re.MULTILINE))
    assert exported <= set(usage) and usage, "the log does not name every kernel"
    limit = MAX_REGISTERS_OF_PROMPTS if file.startswith(PROMPTS) else MAX_REGISTERS
    for entry, used in usage.items():
        assert (used.spills, used.stack) == (0, 0), entry
        assert used.registers <= limit, entry


@pytest.mark.parametrize("case", [case for case in ALL if case.ptx], ids=str)
def test_two_blocks_fit_an_sm(case: Case) -> None:
    call = case.make().call
    usage = usage_of(compiled(case.file).log)[call.entry]
    assert call.shared_bytes <= MAX_SHARED
    assert usage.blocks_per_sm(call.block, call.shared_bytes) >= 2


def test_occupancy_of_known_figures() -> None:
    """Worked by hand from the guide's limits: by threads, registers, shared memory, blocks."""
    assert Usage(40, 0, 0).blocks_per_sm(256, 0) == 6
    assert Usage(128, 0, 0).blocks_per_sm(256, 0) == 2
    assert Usage(32, 0, 0).blocks_per_sm(128, 48 << 10) == 2
    assert Usage(32, 0, 0).occupancy(64, 0) == 16 * 64 / 1536


def test_the_log_is_understood() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_86'\n"
        "ptxas info    : Function properties for k\n"
        "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 34 registers, used 1 barriers, 420 bytes cmem[0]\n"
    )
    assert usage_of(log) == {"k": Usage(34, 8, 16)}
