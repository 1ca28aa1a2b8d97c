"""Routed experts as launches: tables made on the host, gate_up, down, the weighted sum in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.expert_prefill import prefill_launches
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import ExpertGroup, SumInto
from strata.device.base import Buffer, Launch
from strata.memory.regions import Arena
from strata.store.formats import UNIT_COLS


@dataclass(frozen=True)
class Tables:
    """What the kernels look up, as 4-byte words one after the other, how many of each there are, and how many
    pairs each expert has.

    addresses: two words per expert. A pair is one (row, choice); pairs are numbered expert by expert,
    ascending, so that a row's pairs are in the order of their experts when they are in that of their numbers.
    """

    words: NDArray[np.uint32]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Of all experts."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """Of one expert."""
        return max(self.counts, default=0)

    @classmethod
    def of(cls, group: ExpertGroup) -> Tables:
        """From the routes of a group."""
        rows = len(group.ids)
        chosen = [np.argwhere(group.ids == expert) for expert in group.experts]  # (row, choice), by rows
        counts = [len(found) for found in chosen]
        pairs = np.concatenate([*chosen, np.empty((0, 2), np.int64)])
        order = np.argsort(pairs[:, 0], kind="stable")
        first_of_token = np.searchsorted(pairs[order, 0], np.arange(rows + 1))
        parts: list[NDArray[Any]] = [
            np.array([record.address for record in group.records], np.uint64).view(np.uint32),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            pairs[:, 0].astype(np.int32),
            order.astype(np.int32),
            group.weights[pairs[order, 0], pairs[order, 1]].astype(np.float32),
            first_of_token.astype(np.int32),
        ]
        words = np.concatenate([part.view(np.uint32) for part in parts])
        return cls(words, tuple(len(part) for part in parts), tuple(counts))

    def slices(self, buffer: Buffer) -> list[Buffer]:
        """Each table's range; an empty one is given the word behind it."""
        ends = np.cumsum(self.sizes)
        starts = [int(end) - size for end, size in zip(ends, self.sizes, strict=True)]
        return [buffer.slice(4 * a, 4 * max(n, 1)) for a, n in zip(starts, self.sizes, strict=True)]


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
