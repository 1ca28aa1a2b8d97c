"""The best logits of every row, and what a sampler draws of them: csrc/cuda/head_topk.cu, verify_draft.cu."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand
from strata.backends.hybrid.arrays import DraftTables, Matrix
from strata.device.base import Launch
from strata.memory.regions import Arena


def topk_launches(
    launcher: Launcher, logits: Matrix, columns: int, values: Matrix, ids: Matrix, scratch: Arena
) -> Iterator[Launch]:
    """See `KernelSet.head_topk`. One span needs no second launch."""
    rows, top, span = logits.rows, values.cols, launch_shapes.TOPK_SPAN
    spans = -(-columns // span)
    found = values.buffer, ids.buffer
    if spans > 1:
        nbytes = rows * spans * top * 4
        found = scratch.take(nbytes, "best of spans"), scratch.take(nbytes, "their ids")
    shape = launch_shapes.head_topk(rows, columns)
    arguments: tuple[Operand, ...] = (logits.buffer, NULL, *found, columns, logits.cols, span, top)
    yield launcher.make(shape, arguments, (logits.buffer,), found)
    if spans == 1:
        return
    count = spans * top
    shape = launch_shapes.head_topk(rows, count, count)
    arguments = (*found, values.buffer, ids.buffer, count, count, count, top)
    yield launcher.make(shape, arguments, found, (values.buffer, ids.buffer))


def verify_launches(
    launcher: Launcher, values: Matrix, ids: Matrix, drafts: DraftTables, accepted: Matrix, tokens: Matrix
) -> Iterator[Launch]:
    """See `KernelSet.verify_draft`."""
    sequences = drafts.settings.rows
    tables = (drafts.first_row, drafts.draft, drafts.settings, drafts.numbers)
    reads = (values.buffer, ids.buffer, *(table.buffer for table in tables))
    writes = (accepted.buffer, tokens.buffer)
    arguments: tuple[Operand, ...] = (*reads, *writes, values.cols, sequences)
    yield launcher.make(launch_shapes.verify_draft(sequences), arguments, reads, writes)
