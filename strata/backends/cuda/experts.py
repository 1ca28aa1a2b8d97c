"""Routed experts as launches: tables made on the host, gate_up, then down with the sum in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.expert_prefill import prefill_launches
from strata.backends.cuda.expert_tables import NEAR_WORDS, Tables
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import ExpertGroup, SumInto
from strata.device.base import Buffer, ByValue, Launch
from strata.memory.regions import Arena
from strata.store.formats import UNIT_COLS

NOT_NEAR = ByValue(bytes(4 * NEAR_WORDS))


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
    layout, count = group.layout, max(tables.pairs, 1)
    both = layout.slice_bytes * layout.slices
    few = tables.pairs and not choice.experts(both, layout.hidden, x.rows, tables.counts)
    tickets = launcher.tickets_for(layout.down.blocks) if few else None
    near = tables.near() if tickets is not None else None
    if near is None:
        far = scratch.take(tables.words.nbytes, "tables of experts")
        yield _bring(launcher, group.pinned(tables.words, "tables of experts"), far, len(tables.words))
    parts = scratch.take(count * layout.hidden * 4, "outputs of experts")
    if tickets is not None:
        words = _Words((NULL, near), ()) if near is not None else _Words((far, NOT_NEAR), (far,))
        hidden = scratch.take(count * layout.slices * layout.slice_width * 4, "hidden of experts")
        yield _gate_up(launcher, x, group, tables, words, hidden)
        yield _down(launcher, group, tables, words, hidden, _Sum(parts, into, x.rows, tickets))
        return
    addresses, first_pair, token_of_pair, *for_the_sum = tables.slices(far)
    if tables.pairs:
        lists = (addresses, first_pair, token_of_pair)
        yield from prefill_launches(launcher, x, group, tables, lists, parts, scratch)
    yield _combine(launcher, x.rows, layout.hidden, tables.pairs, (parts, *for_the_sum), into)


@dataclass(frozen=True)
class _Words:
    """The tables as two arguments of kernels, and what of them is memory."""

    arguments: tuple[Operand, Operand]
    reads: tuple[Buffer, ...]


@dataclass(frozen=True)
class _Sum:
    """Where the experts' outputs go, and their sum."""

    parts: Buffer
    into: SumInto
    rows: int
    tickets: Buffer


def _bring(launcher: Launcher, source: Buffer, target: Buffer, words: int) -> Launch:
    """Words from pinned memory into device memory, as rows of one head are copied."""
    shape = launch_shapes.elements("copy_heads", words, 1)
    arguments = (source, target, 1, words, words, 0, words, 0)
    return launcher.make(shape, arguments, (source,), (target,))


def _gate_up(
    launcher: Launcher, x: Matrix, group: ExpertGroup, tables: Tables, words: _Words, hidden: Buffer
) -> Launch:
    layout, gating = group.layout, group.gating
    packed = layout.gate_up
    shape = launch_shapes.expert_gate_up(
        packed.format.name, packed.blocks * layout.slices, len(group.experts), tables.most
    )
    bias = layout.gate_up_bias_offset if layout.biases else 0
    sizes = (layout.hidden, packed.padded_cols // UNIT_COLS, layout.slice_width, layout.slice_bytes, bias)
    kind = (launch_shapes.GATING_KINDS[gating.kind], gating.alpha, gating.limit)
    arguments: list[Operand] = [*words.arguments, x.buffer, hidden, *sizes, *kind]
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    return launcher.make(shape, arguments, (*words.reads, x.buffer, *group.records), (hidden,), macs)


def _down(
    launcher: Launcher, group: ExpertGroup, tables: Tables, words: _Words, hidden: Buffer, total: _Sum
) -> Launch:
    layout, into = group.layout, total.into
    packed, out = layout.down, into.target.buffer
    shape = launch_shapes.expert_down(packed.format.name, packed.blocks, len(group.experts), tables.most)
    bias = layout.down_bias_offset if layout.biases else 0
    units = packed.padded_cols // UNIT_COLS
    slices = (layout.slice_width, layout.slices, layout.slice_bytes, layout.down_offset(0))
    pointers: list[Operand] = [hidden, total.parts, or_null(into.rest), out, total.tickets]
    joins = (total.rows, float(into.scale), int(into.add))
    arguments = [*words.arguments, *pointers, layout.hidden, units, *slices, bias, *joins]
    macs = tables.pairs * layout.slices * packed.rows * packed.cols
    reads = (*words.reads, hidden, *group.records, *_joined(into), total.tickets)
    return launcher.make(shape, arguments, reads, (total.parts, out, total.tickets), macs)


def _combine(
    launcher: Launcher, rows: int, columns: int, pairs: int, pointers: tuple[Buffer, ...], into: SumInto
) -> Launch:
    """The sum alone. pointers: the experts' outputs, of which there are `pairs`, and three tables."""
    shape, out = launch_shapes.combine_experts(columns, rows), into.target.buffer
    arguments = (*pointers, or_null(into.rest), out, columns // 4, float(into.scale), int(into.add))
    reads = (*(pointers if pairs else pointers[1:]), *_joined(into))
    return launcher.make(shape, arguments, reads, (out,))


def _joined(into: SumInto) -> tuple[Buffer, ...]:
    """What the sum joins."""
    rest = () if into.rest is None else (into.rest.buffer,)
    return (*rest, into.target.buffer) if into.add else rest


def _require(group: ExpertGroup) -> None:
    layout = group.layout
    require_multiple("experts", "columns", layout.hidden, 8)
    require_multiple("experts", "elements of a slice", layout.slice_width, 8)
