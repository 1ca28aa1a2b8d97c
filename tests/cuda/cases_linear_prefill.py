"""pack_activations and linear_prefill: the dequantized matrix in f64, activations rounded to bf16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from packed_tokens import packed_tokens
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import prefill_shapes
from strata.store.formats import FORMATS


def packing(rows: int, columns: int, units: int, with_totals: bool) -> Prepared:
    x = np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32)
    expected, sums = packed_tokens(x, units)
    packed, totals = unwritten(expected.shape, np.uint16), unwritten(sums.shape)
    shape = prefill_shapes.pack_activations(rows, units)

    def check() -> None:
        np.testing.assert_array_equal(packed, expected)
        if with_totals:
            assert_close(totals, sums, 1e-6)

    arguments = (read_only(x), packed, totals if with_totals else None, columns, units)
    return Prepared(call_of(shape, arguments), check)


@dataclass(frozen=True)
class Setup:
    """heads: one small matrix per head, `rows` rows of it and `columns` columns of x each."""

    fmt: str
    rows: int
    columns: int
    tokens: int
    warps: int = 2
    add: bool = False
    bias: bool = False
    heads: int = 0


def linear(setup: Setup) -> Prepared:
    fmt, tokens, heads = setup.fmt, setup.tokens, max(setup.heads, 1)
    rows = setup.rows * heads
    rng = np.random.default_rng(rows + setup.columns + tokens)
    tensor, matrix = random_matrix(fmt, rows, setup.columns, tokens)
    units = tensor.shape.padded_cols // 64
    x = rng.standard_normal((tokens, heads, setup.columns)).astype(np.float32)
    packed, totals = packed_tokens(x.reshape(tokens * heads, -1), units)
    offsets = rng.standard_normal(rows).astype(np.float32) if setup.bias else None
    by_head = matrix.reshape(heads, setup.rows, -1)
    expected = np.einsum("thc,hrc->thr", bf16_values(bf16_bits(x)).astype(np.float64), by_head)
    expected = expected.reshape(tokens, rows) + (0.0 if offsets is None else offsets)
    y = unwritten((tokens, rows))
    if setup.add:
        y[:] = rng.standard_normal(y.shape)
        expected = y + 0.5 * expected
    shape = prefill_shapes.linear_prefill(fmt, rows, tokens, setup.warps)
    arrays = (
        read_only(tensor.data),
        read_only(packed),
        read_only(totals) if FORMATS[fmt].minimum else None,
        None if offsets is None else read_only(offsets),
        y,
    )
    head_blocks = setup.rows // 16 if setup.heads else 0
    numbers = (rows, units, tokens, units * heads, head_blocks, 0.5, int(setup.add))
    return Prepared(
        call_of(shape, (*arrays, *numbers)),
        lambda: assert_close(y, expected, 2e-6),
        {(0,): tensor.data.nbytes * shape.grid[0]},
    )


def case(name: str, ptx: bool, setup: Setup) -> Case:
    return Case(f"{setup.fmt}-{name}", "linear_prefill", lambda: linear(setup), ptx)


SIMULATED = ("w4g64", "w4g32m", "w4g128m", "mxfp4", "w8", "w8g32", "bf16", "f16")
# 320 columns are five units: every stage is filled twice.
CASES = [
    Case("plain", "pack_activations", lambda: packing(3, 328, 6, False), True),
    Case("totals", "pack_activations", lambda: packing(2, 136, 3, True), True),
    Case("blocks", "pack_activations", lambda: packing(1, 2120, 34, True)),
    *(case("stages", fmt in SIMULATED, Setup(fmt, 32, 320, 20)) for fmt in FORMATS),
    *(case("tails", False, Setup(fmt, 37, 72, 9, add=True, bias=True)) for fmt in FORMATS),
    case("two-tiles", True, Setup("w4g64", 48, 128, 150, bias=True)),
    case("two-tiles", False, Setup("w4g64m", 16, 64, 100)),
    case("all-warps", True, Setup("w4g64", 136, 200, 33, warps=8, add=True)),
    case("heads", False, Setup("w8", 32, 72, 17, heads=3)),
    case("heads", False, Setup("w4g32m", 32, 64, 5, heads=2)),
]
