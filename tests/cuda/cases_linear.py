"""linear: every format against the dequantized matrix in f64, activations rounded to bf16 as there."""

from __future__ import annotations

import numpy as np
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.store.formats import FORMATS


def prepare(
    fmt: str, rows: int, columns: int, tokens: int, per_block: int, add: bool, bias: bool
) -> Prepared:
    rng = np.random.default_rng(rows + columns + tokens)
    tensor, matrix = random_matrix(fmt, rows, columns, tokens)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    offsets = rng.standard_normal(rows).astype(np.float32) if bias else None
    expected = bf16_values(bf16_bits(x)).astype(np.float64) @ matrix.T + (
        offsets if offsets is not None else 0.0
    )
    y = unwritten((tokens, rows))
    if add:
        y[:] = rng.standard_normal(y.shape)
        expected = y + 0.5 * expected
    shape = launch_shapes.linear(fmt, rows, tokens, per_block)
    units = tensor.shape.padded_cols // 64
    arguments = (read_only(tensor.data), read_only(x), None if offsets is None else read_only(offsets), y)
    numbers = (rows, columns, units, tokens, per_block, columns, 0, 0.5, int(add))
    tiles = shape.grid[1]
    return Prepared(
        call_of(shape, (*arguments, *numbers)),
        lambda: assert_close(y, expected, 2e-6),
        {(0,): tensor.data.nbytes * tiles},
    )


def case(
    name: str,
    ptx: bool,
    fmt: str,
    rows: int,
    columns: int,
    tokens: int,
    per_block: int = 1,
    add: bool = False,
    bias: bool = False,
) -> Case:
    title = f"{fmt}-{name}"
    return Case(title, "linear", lambda: prepare(fmt, rows, columns, tokens, per_block, add, bias), ptx)


SIMULATED = ("w4g64", "w4g32m", "w4g128", "mxfp4", "w8", "bf16", "f16")
# 1,024 columns are 4 units for each of the four warps: every stage of the loop.
CASES = [
    *(case("one-token", fmt in SIMULATED, fmt, 32, 1024, 1) for fmt in FORMATS),
    *(case("sixteen", fmt == "w4g32m", fmt, 16, 512, 16, bias=True) for fmt in FORMATS),
    *(case("tails", fmt == "w4g64", fmt, 37, 200, 5, 2, add=True) for fmt in FORMATS),
    case("one-unit", False, "w4g64", 16, 64, 3),
    case("two-tiles-of-tokens", True, "w4g64", 33, 328, 21, 4, bias=True),
    case("row-blocks", False, "w4g128", 80, 384, 8, 4),
    case("row-blocks", False, "w4g64", 48, 704, 11, 2, add=True, bias=True),
]
