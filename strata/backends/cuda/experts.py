"""Routed experts as launches: tables made on the host, gate_up, down, the weighted sum in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.expert_prefill import prefill_launches
from strata.backends.cuda.expert_tables import Tables
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import ExpertGroup, SumInto
from strata.device.base import Buffer, Launch
from strata.memory.regions import Arena
from strata.store.formats import UNIT_COLS


def expert_launches(
    launcher: Launcher,
    x: Matrix,
    group: ExpertGroup,
    into: SumInto,
    scratch: Arena,
    choice: PrefillChoice,
) -> Iterator[Launch]:
    """See `KernelSet.experts`. choice: whether the experts of this group are a prompt's."""
    _require(group)
    tables = Tables.of(group)
    near = scratch.take(tables.words.nbytes, "tables of experts")
    yield _bring(launcher, group.pinned(tables.words, "tables of experts"), near, len(tables.words))
    addresses, first_pair, token_of_pair, order, weights, first_of_token = tables.slices(near)
    layout, count = group.layout, max(tables.pairs, 1)
    parts = scratch.take(count * layout.hidden * 4, "outputs of experts")
    both = layout.slice_bytes * layout.slices
    if tables.pairs and choice.experts(both, layout.hidden, x.rows, tables.counts):
        lists = (addresses, first_pair, token_of_pair)
        yield from prefill_launches(launcher, x, group, tables, lists, parts, scratch)
    elif tables.pairs:
        hidden = scratch.take(count * layout.slices * layout.slice_width * 4, "hidden of experts")
        yield _gate_up(launcher, x, group, tables, (addresses, first_pair, token_of_pair), hidden)
        yield _down(launcher, group, tables, (addresses, first_pair), hidden, parts)
    shape, out = launch_shapes.combine_experts(layout.hidden, x.rows), into.target.buffer
    pointers = (parts, order, weights, first_of_token)
    arguments = (*pointers, or_null(into.rest), out, layout.hidden // 4, float(into.scale), int(into.add))
    kept = (*(() if into.rest is None else (into.rest.buffer,)), *((out,) if into.add else ()))
    yield launcher.make(shape, arguments, (*(pointers if tables.pairs else pointers[1:]), *kept), (out,))


def _bring(launcher: Launcher, source: Buffer, target: Buffer, words: int) -> Launch:
    """Words from pinned memory into device memory, as rows of one head are copied."""
    shape = launch_shapes.elements("copy_heads", words, 1)
    arguments = (source, target, 1, words, words, 0, words, 0)
    return launcher.make(shape, arguments, (source,), (target,))


def _gate_up(
    launcher: Launcher,
    x: Matrix,
    group: ExpertGroup,
    tables: Tables,
    pointers: tuple[Buffer, ...],
    hidden: Buffer,
) -> Launch:
    layout, gating = group.layout, group.gating
    packed = layout.gate_up
    shape = launch_shapes.expert_gate_up(
        packed.format.name, packed.blocks * layout.slices, len(group.experts), tables.most
    )
    bias = layout.gate_up_bias_offset if layout.biases else 0
    sizes = (layout.hidden, packed.padded_cols // UNIT_COLS, layout.slice_width, layout.slice_bytes, bias)
    kind = (launch_shapes.GATING_KINDS[gating.kind], gating.alpha, gating.limit)
    arguments: list[Operand] = [*pointers, x.buffer, hidden, *sizes, *kind]
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    return launcher.make(shape, arguments, (*pointers, x.buffer, *group.records), (hidden,), macs)


def _down(
    launcher: Launcher,
    group: ExpertGroup,
    tables: Tables,
    pointers: tuple[Buffer, ...],
    hidden: Buffer,
    parts: Buffer,
) -> Launch:
    layout = group.layout
    packed = layout.down
    shape = launch_shapes.expert_down(packed.format.name, packed.blocks, len(group.experts), tables.most)
    bias = layout.down_bias_offset if layout.biases else 0
    units = packed.padded_cols // UNIT_COLS
    slices = (layout.slice_width, layout.slices, layout.slice_bytes, layout.down_offset(0))
    arguments: list[Operand] = [*pointers, hidden, parts, layout.hidden, units, *slices, bias]
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    return launcher.make(shape, arguments, (*pointers, hidden, *group.records), (parts,), macs)


def _require(group: ExpertGroup) -> None:
    layout = group.layout
    require_multiple("experts", "columns", layout.hidden, 8)
    require_multiple("experts", "elements of a slice", layout.slice_width, 8)
