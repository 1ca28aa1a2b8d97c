"""Packed matrices times rows as launches: a few rows at once, or a prompt's rows on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from strata.backends.cuda import launch_shapes, prefill_shapes
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.cuda.norms import norm_launch
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.arrays import Matrix, PackedOnDevice
from strata.backends.hybrid.kernel_set import NormOf
from strata.backends.parts import Gating
from strata.device.base import Buffer, Launch
from strata.memory.regions import Arena
from strata.store.formats import ROW_BLOCK, UNIT_COLS


def linear_launches(
    launcher: Launcher,
    x: Matrix,
    weight: PackedOnDevice,
    bias: Matrix | None,
    out: Matrix,
    heads: int,
    scratch: Arena,
    choice: PrefillChoice,
    add: float | None = None,
    norm: NormOf | None = None,
    gating: Gating | None = None,
) -> Iterator[Launch]:
    """One launch, or two for a prompt, and one more for the norm of one. heads: one small matrix per head, 0
    for one matrix. add: what the product is scaled by before it joins `out`; None: it becomes `out`. gating:
    of a gate_up whose product is gated at once, where `gates_at_once`."""
    packed = weight.shape
    require_multiple("linear", "columns", packed.cols, 8)
    in_int8 = choice.int8 and packed.format.name == "w8" and not heads
    for_prompts = choice.linear(packed.nbytes, packed.cols * max(heads, 1), x.rows)
    if norm is not None and (in_int8 or for_prompts):
        normed = Matrix(scratch.take(x.rows * x.cols * 4, "normed rows"), x.rows, x.cols)
        yield norm_launch(launcher, x, norm, normed)
        x, norm = normed, None
    if in_int8:
        yield from _w8a8(launcher, x, weight, bias, out, scratch, choice, add)
        return
    if for_prompts:
        yield from _prefill(launcher, x, weight, bias, out, heads, scratch, add)
        return
    head_rows = packed.rows // heads if heads else 0
    per_block = 1 if heads else launch_shapes.row_blocks_per_block(packed.blocks, x.rows)
    shape = launch_shapes.linear(packed.format.name, packed.rows, x.rows, per_block, norm is not None)
    units = packed.padded_cols // UNIT_COLS
    sizes = (packed.rows, packed.cols, units, x.rows, per_block, x.cols, head_rows)
    factors = (NULL, 0.0) if norm is None else (norm.weight.buffer, norm.eps)
    gates = (-1, 0.0, 0.0, 0) if gating is None else (*gating_numbers(gating), out.cols)
    arguments = (weight.buffer, x.buffer, or_null(bias), out.buffer, *sizes, *_joins(add), *factors, *gates)
    normed_by = () if norm is None else (norm.weight.buffer,)
    reads = _reads(weight, bias, x.buffer, *_kept(out, add), *normed_by)
    yield launcher.make(shape, arguments, reads, (out.buffer,), x.rows * packed.rows * packed.cols)


def gates_at_once(weight: PackedOnDevice, rows: int, choice: PrefillChoice) -> bool:
    """Whether one kernel multiplies by gate_up and gates: not those for prompts and for int8 activations."""
    packed = weight.shape
    in_int8 = choice.int8 and packed.format.name == "w8"
    return not in_int8 and not choice.linear(packed.nbytes, packed.cols, rows)


def gating_numbers(gating: Gating) -> tuple[int, float, float]:
    """The arguments by which kernels know an activation."""
    return launch_shapes.GATING_KINDS[gating.kind], gating.alpha, gating.limit


def _prefill(
    launcher: Launcher,
    x: Matrix,
    weight: PackedOnDevice,
    bias: Matrix | None,
    out: Matrix,
    heads: int,
    scratch: Arena,
    add: float | None,
) -> Iterator[Launch]:
    packed, parts = weight.shape, max(heads, 1)
    units = packed.padded_cols // UNIT_COLS
    with scratch.scope() as room:
        values, totals, launch = pack_launch(
            launcher, Matrix(x.buffer, x.rows * parts, packed.cols), units, packed.format.minimum, room
        )
        yield launch
        shape = prefill_shapes.linear_prefill(packed.format.name, packed.rows, x.rows)
        head_blocks = packed.blocks // heads if heads else 0
        if heads:
            warps = gcd(shape.block // launch_shapes.WARP, head_blocks)
            shape = prefill_shapes.linear_prefill(packed.format.name, packed.rows, x.rows, warps)
        sizes = (packed.rows, units, x.rows, units * parts, head_blocks)
        operands: list[Operand] = [weight.buffer, values, NULL if totals is None else totals]
        arguments = (*operands, or_null(bias), out.buffer, *sizes, *_joins(add))
        kept = _kept(out, add) if totals is None else (totals, *_kept(out, add))
        reads = _reads(weight, bias, values, *kept)
        yield launcher.make(shape, arguments, reads, (out.buffer,), x.rows * packed.rows * packed.cols)


def _w8a8(
    launcher: Launcher,
    x: Matrix,
    weight: PackedOnDevice,
    bias: Matrix | None,
    out: Matrix,
    scratch: Arena,
    choice: PrefillChoice,
    add: float | None,
) -> Iterator[Launch]:
    packed = weight.shape
    units = packed.padded_cols // UNIT_COLS
    with scratch.scope() as room:
        codes = room.take(x.rows * units * UNIT_COLS, "int8 activations")
        scales = room.take(x.rows * 4, "scales of activations")
        shape = prefill_shapes.quantize_rows(x.rows)
        arguments = (x.buffer, codes, scales, packed.cols // 4, units * UNIT_COLS // 4)
        yield launcher.make(shape, arguments, (x.buffer,), (codes, scales))
        many = choice.linear(packed.nbytes, packed.cols, x.rows)
        shape_of = prefill_shapes.linear_w8a8_prefill if many else prefill_shapes.linear_w8a8
        sizes = (packed.rows, units, x.rows)
        operands = (weight.buffer, codes, scales, or_null(bias), out.buffer, *sizes, *_joins(add))
        reads = _reads(weight, bias, codes, scales, *_kept(out, add))
        macs = x.rows * packed.rows * packed.cols
        yield launcher.make(shape_of(packed.rows, x.rows), operands, reads, (out.buffer,), macs)


def pack_launch(
    launcher: Launcher, x: Matrix, units: int, with_totals: bool, room: Arena
) -> tuple[Buffer, Buffer | None, Launch]:
    """x as the kernels for prompts read it: values, totals for formats with a minimum, and the launch."""
    values = room.take(x.rows * units * UNIT_COLS * 2, "packed activations")
    totals = room.take(x.rows * units * 16, "totals of activations") if with_totals else None
    shape = prefill_shapes.pack_activations(x.rows, units)
    arguments = (x.buffer, values, NULL if totals is None else totals, x.cols, units)
    writes = (values,) if totals is None else (values, totals)
    return values, totals, launcher.make(shape, arguments, (x.buffer,), writes)


def _joins(add: float | None) -> tuple[float, int]:
    """The kernels' last two arguments."""
    return (1.0, 0) if add is None else (float(add), 1)


def _kept(out: Matrix, add: float | None) -> tuple[Buffer, ...]:
    return () if add is None else (out.buffer,)


def _reads(weight: PackedOnDevice, bias: Matrix | None, *others: Buffer) -> tuple[Buffer, ...]:
    return (*others, weight.buffer, *(() if bias is None else (bias.buffer,)))


def require_heads(rows: int, heads: int) -> None:
    """UnsupportedError: a head's rows would share a row block with the next one's."""
    require_multiple("head_linear", "rows of a head", rows // heads, ROW_BLOCK)
