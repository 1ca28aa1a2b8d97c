"""Experts of prompts as launches: x packed, gate_up into packed hidden, down, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes, prefill_shapes
from strata.backends.cuda.expert_tables import Tables
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand
from strata.backends.cuda.linear import pack_launch
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import ExpertGroup
from strata.device.base import Buffer, Launch
from strata.memory.regions import Arena
from strata.store.formats import UNIT_COLS

Packed = tuple[Buffer, Buffer | None]
"""bf16 values and, for formats with a minimum, totals (csrc/cuda/pack_activations.cu)."""


def prefill_launches(
    launcher: Launcher,
    x: Matrix,
    group: ExpertGroup,
    tables: Tables,
    lists: tuple[Buffer, ...],
    parts: Buffer,
    scratch: Arena,
) -> Iterator[Launch]:
    """lists: addresses, first_pair, token_of_pair of `tables`. parts: f32 [pairs, hidden], the outputs."""
    layout = group.layout
    units = layout.gate_up.padded_cols // UNIT_COLS
    values, totals, launch = pack_launch(launcher, x, units, layout.gate_up.format.minimum, scratch)
    yield launch
    row_units = layout.slices * layout.down.padded_cols // UNIT_COLS
    hidden = scratch.take(tables.pairs * row_units * UNIT_COLS * 2, "hidden of experts")
    sums = scratch.take(tables.pairs * row_units * 16, "totals") if layout.down.format.minimum else None
    yield _gate_up(launcher, group, tables, lists, (values, totals), (hidden, sums))
    yield _down(launcher, group, tables, lists[:2], (hidden, sums), parts)


def _gate_up(
    launcher: Launcher,
    group: ExpertGroup,
    tables: Tables,
    lists: tuple[Buffer, ...],
    x: Packed,
    hidden: Packed,
) -> Launch:
    layout, gating, packed = group.layout, group.gating, group.layout.gate_up
    units = layout.down.padded_cols // UNIT_COLS
    shape = prefill_shapes.expert_gate_up_prefill(
        packed.format.name, layout.slices, units, len(group.experts), tables.most
    )
    bias = layout.gate_up_bias_offset if layout.biases else 0
    sizes = (packed.padded_cols // UNIT_COLS, layout.slice_width, layout.slice_bytes, units, layout.slices)
    kind = (launch_shapes.GATING_KINDS[gating.kind], gating.alpha, gating.limit)
    arguments = (*lists, *_pointers(x), *_pointers(hidden), *sizes, bias, *kind)
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    return launcher.make(shape, arguments, (*lists, *_there(x), *group.records), _there(hidden), macs)


def _down(
    launcher: Launcher,
    group: ExpertGroup,
    tables: Tables,
    lists: tuple[Buffer, ...],
    hidden: Packed,
    parts: Buffer,
) -> Launch:
    layout, packed = group.layout, group.layout.down
    shape = prefill_shapes.expert_down_prefill(
        packed.format.name, packed.blocks, len(group.experts), tables.most
    )
    units = packed.padded_cols // UNIT_COLS
    sizes = (layout.hidden, units, layout.slices, layout.slice_bytes, layout.down_offset(0))
    bias = layout.down_bias_offset if layout.biases else 0
    arguments = (*lists, *_pointers(hidden), parts, *sizes, bias)
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    return launcher.make(shape, arguments, (*lists, *_there(hidden), *group.records), (parts,), macs)


def _pointers(packed: Packed) -> tuple[Operand, Operand]:
    values, totals = packed
    return values, NULL if totals is None else totals


def _there(packed: Packed) -> tuple[Buffer, ...]:
    return tuple(part for part in packed if part is not None)
