"""The work of a conversion: every tensor and expert as pieces of packed bytes that any thread can make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strata.store.formats import ROW_BLOCK, ExpertLayout, PackedShape
from strata.store.pack import Codes, pack, pack_into
from strata.store.quantize import quantize, to_bf16
from strata.store.rows import BlockRows, Rows, ValueGuard
from strata.store.scaled_rows import NONE, Scaling, scaled
from strata.store.source import CheckpointSource, SourceRows, TargetExpert, TargetTensor
from strata.store.stacking import InterleavedRows, interleave, target_rows
from strata.store.treatment import PLAIN_EXPERT, ExpertTreatment, Rounding

Bytes = NDArray[np.uint8]
_PIECE_VALUES = 4 << 20  # 16 MiB of f32 at a time


@dataclass(frozen=True)
class Task:
    """One record of the store: its pieces, in order, and the guard that counts replaced values.

    label: for people who watch the progress.
    """

    file: str
    name: str
    label: str
    pieces: tuple[Callable[[], Bytes], ...]
    guard: ValueGuard


@dataclass(frozen=True)
class Coding:
    """How rows become codes: rounded into `shape.format`, or copied from a source that has it already."""

    shape: PackedShape
    kept: bool
    name: str
    rounding: Rounding = quantize

    def codes(self, rows: Rows, start: int, stop: int) -> Codes:
        """Codes of rows [start, stop)."""
        if self.kept:
            return rows.kept(start, stop)
        return self.rounding(rows.floats(start, stop), self.shape.format, self.name, start)


def block_runs(shape: PackedShape) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of runs of whole row blocks, about _PIECE_VALUES each; the last may be short."""
    step = max(1, _PIECE_VALUES // (ROW_BLOCK * shape.padded_cols)) * ROW_BLOCK
    for start in range(0, shape.rows, step):
        yield start, min(start + step, shape.rows)


def packed_task(
    source: CheckpointSource,
    target: TargetTensor,
    file: str,
    coding: Coding,
    allow_nan: bool,
    scaling: Scaling = NONE,
) -> Task:
    """A packed matrix: each piece is a run of row blocks."""
    guard = ValueGuard(allow_nan)
    rows = target_rows(source, target, guard, coding.shape.format.zero_code, scaling)

    def piece(start: int, stop: int) -> Bytes:
        part = PackedShape(coding.shape.format, stop - start, coding.shape.cols)
        return pack(part, coding.codes(rows, start, stop))

    runs = block_runs(coding.shape)
    return Task(file, target.name, target.name, tuple(partial(piece, *run) for run in runs), guard)


def plain_task(
    source: CheckpointSource,
    target: TargetTensor,
    file: str,
    dtype: str,
    allow_nan: bool,
    scaling: Scaling = NONE,
) -> Task:
    """A vector or small matrix stored as BF16 or F32; factors multiply its last dimension."""
    guard = ValueGuard(allow_nan)
    blocks = [BlockRows(source, block, guard) for block in target.sources]

    def piece() -> Bytes:
        values = np.concatenate([vector(block) for block in blocks])
        if scaling.cols is not None:
            values = (values.reshape(-1, len(scaling.cols)) * scaling.cols).reshape(-1)
        return (to_bf16(values) if dtype == "BF16" else values).view(np.uint8)

    return Task(file, target.name, target.name, (piece,), guard)


@dataclass(frozen=True)
class ExpertCoding:
    """The layout of a layer's experts and which of their matrices are copied."""

    layout: ExpertLayout
    gate_up_kept: bool
    down_kept: bool


def expert_task(
    source: CheckpointSource,
    target: TargetExpert,
    file: str,
    coding: ExpertCoding,
    allow_nan: bool,
    treat: Callable[[TargetExpert], ExpertTreatment] = lambda _: PLAIN_EXPERT,
) -> Task:
    """An expert's record, in one piece. treat: how its matrices are scaled and rounded."""
    guard = ValueGuard(allow_nan)
    expert = _Expert(source, target, coding, guard)

    def piece() -> Bytes:
        record = np.zeros(coding.layout.record_bytes, np.uint8)
        how = treat(target)
        expert.fill_gate_up(how, record)
        expert.fill_down(how, record)
        if coding.layout.biases:
            expert.fill_biases(record)
        return record

    label = f"layer {target.layer}, expert {target.index}"
    return Task(file, f"layers.{target.layer}", label, (piece,), guard)


@dataclass(frozen=True)
class _Expert:
    """Writes the parts of one expert's record."""

    source: CheckpointSource
    target: TargetExpert
    coding: ExpertCoding
    guard: ValueGuard

    def fill_gate_up(self, treatment: ExpertTreatment, record: Bytes) -> None:
        target, layout, shape = self.target, self.coding.layout, self.coding.layout.gate_up
        gate = scaled(self._rows(target.gate), treatment.gate)
        up = scaled(self._rows(target.up), treatment.up)
        label = f"{target.gate.name} and {target.up.name}"
        how = Coding(shape, self.coding.gate_up_kept, label, treatment.gate_up_rounding)
        for part in range(layout.slices):
            first = part * layout.slice_width
            rows = InterleavedRows(gate, up, first, layout.slice_width, shape.format.zero_code)
            base = layout.gate_up_offset(part)
            for start, stop in block_runs(shape):
                _pack_run(
                    shape, how.codes(rows, start, stop), start, stop, record[base : base + shape.nbytes]
                )

    def fill_down(self, treatment: ExpertTreatment, record: Bytes) -> None:
        layout, shape = self.coding.layout, self.coding.layout.down
        rows = scaled(self._rows(self.target.down), treatment.down)
        whole = PackedShape(shape.format, layout.hidden, layout.width)
        how = Coding(whole, self.coding.down_kept, self.target.down.name, treatment.down_rounding)
        for start, stop in block_runs(whole):
            codes = how.codes(rows, start, stop)
            for part in range(layout.slices):
                base = layout.down_offset(part)
                cut = _columns(codes, part, layout.slices)
                _pack_run(shape, cut, start, stop, record[base : base + shape.nbytes])

    def fill_biases(self, record: Bytes) -> None:
        target, layout = self.target, self.coding.layout
        assert target.gate_bias and target.up_bias and target.down_bias
        blocks = (target.gate_bias, target.up_bias, target.down_bias)
        gate, up, down = (vector(self._rows(block)) for block in blocks)
        offset = layout.gate_up_bias_offset
        for part in range(layout.slices):
            cut = slice(part * layout.slice_width, (part + 1) * layout.slice_width)
            bias = interleave((gate[cut, None], up[cut, None]), 0).reshape(-1).view(np.uint8)
            record[offset : offset + bias.nbytes] = bias
            offset += bias.nbytes
        record[layout.down_bias_offset :][: down.nbytes] = down.view(np.uint8)

    def _rows(self, block: SourceRows) -> BlockRows:
        return BlockRows(self.source, block, self.guard)


def _columns(codes: Codes, part: int, parts: int) -> Codes:
    """Columns of slice `part` and their groups; per-row scales belong to every slice."""
    if parts == 1:
        return codes

    def cut(array: NDArray[np.generic]) -> NDArray[np.generic]:
        width = array.shape[1] // parts
        return array[:, part * width : (part + 1) * width] if array.shape[1] > 1 else array

    scales = None if codes.scales is None else cut(codes.scales)
    minimums = None if codes.minimums is None else cut(codes.minimums)
    return Codes(np.ascontiguousarray(cut(codes.values)), scales, minimums)


def _pack_run(shape: PackedShape, codes: Codes, start: int, stop: int, out: Bytes) -> None:
    """Pack rows [start, stop), a run of row blocks, to where they belong in `out`."""
    part = PackedShape(shape.format, stop - start, shape.cols)
    offset = start // ROW_BLOCK * shape.block_bytes
    pack_into(part, codes, out[offset : offset + part.nbytes])


def vector(rows: Rows) -> NDArray[np.float32]:
    """All of a vector or small matrix, f32, flattened."""
    return np.ascontiguousarray(rows.floats(0, rows.count), np.float32).reshape(-1)
