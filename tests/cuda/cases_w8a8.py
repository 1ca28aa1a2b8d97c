"""w8 times int8 activations, and the kernel that makes those: products are exact, scales in f64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import Case, Prepared, assert_close, call_of
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import prefill_shapes


def quantizing(rows: int, columns: int, units: int) -> Prepared:
    x = np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32)
    x[-1, min(columns - 1, 923)] = -99  # in the last warp's part, in a quad's last place
    x[0] = 0
    codes, scales = unwritten((rows, units * 64), np.int8), unwritten((rows,))
    largest = np.abs(x).max(axis=1)
    steps = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    expected = np.zeros(codes.shape, np.int8)
    expected[:, :columns] = np.rint(x * steps[:, None])

    def check() -> None:
        np.testing.assert_array_equal(codes, expected)
        np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)

    shape = prefill_shapes.quantize_rows(rows)
    return Prepared(call_of(shape, (read_only(x), codes, scales, columns // 4, units * 16)), check)


@dataclass(frozen=True)
class Setup:
    """warps: None for the kernel of few tokens."""

    rows: int
    columns: int
    tokens: int
    warps: int | None = None
    add: bool = False
    bias: bool = False


def linear(setup: Setup) -> Prepared:
    rows, tokens = setup.rows, setup.tokens
    rng = np.random.default_rng(rows + setup.columns + tokens)
    tensor, matrix = random_matrix("w8", rows, setup.columns, tokens)
    units = tensor.shape.padded_cols // 64
    codes = np.zeros((tokens, units * 64), np.int8)
    codes[:, : setup.columns] = rng.integers(-127, 128, (tokens, setup.columns))
    scales = rng.uniform(0.1, 2.0, tokens).astype(np.float32)
    offsets = rng.standard_normal(rows).astype(np.float32) if setup.bias else None
    expected = codes[:, : setup.columns].astype(np.float64) @ matrix.T * scales[:, None]
    expected += 0.0 if offsets is None else offsets
    y = unwritten((tokens, rows))
    if setup.add:
        y[:] = rng.standard_normal(y.shape)
        expected = y + 0.5 * expected
    if setup.warps is None:
        shape = prefill_shapes.linear_w8a8(rows, tokens)
        tiles = shape.grid[1]
    else:
        shape = prefill_shapes.linear_w8a8_prefill(rows, tokens, setup.warps)
        tiles = shape.grid[0]
    arrays = (
        read_only(tensor.data),
        read_only(codes),
        read_only(scales),
        None if offsets is None else read_only(offsets),
        y,
    )
    return Prepared(
        call_of(shape, (*arrays, rows, units, tokens, 0.5, int(setup.add))),
        lambda: assert_close(y, expected, 1e-6),
        {(0,): tensor.data.nbytes * tiles},
    )


def case(name: str, ptx: bool, *arguments: int, **options: int | bool) -> Case:
    setup = Setup(*arguments, **options)
    file = "linear_w8a8" if setup.warps is None else "linear_w8a8_prefill"
    return Case(name, file, lambda: linear(setup), ptx)


# A warp of linear_w8a8 takes every fourth unit; linear_w8a8_prefill has four stages of a unit.
CASES = [
    Case("rows", "quantize_rows", lambda: quantizing(3, 136, 3), True),
    Case("wide", "quantize_rows", lambda: quantizing(2, 1096, 18)),
    case("one-token", True, 32, 640, 1),
    case("sixteen", True, 16, 576, 16, bias=True),
    case("tails", False, 37, 200, 21, add=True),
    case("stages", True, 64, 384, 20, warps=2),
    case("tails", True, 37, 200, 9, warps=2, add=True, bias=True),
    case("two-tiles", False, 48, 64, 80, warps=2),
    case("all-warps", False, 272, 72, 33, warps=8, bias=True),
]
