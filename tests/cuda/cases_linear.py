"""linear: every format against the dequantized matrix in f64, activations rounded to bf16 as there."""

from __future__ import annotations

import numpy as np
import torch
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.launch_shapes import GATING_KINDS
from strata.backends.parts import Gating
from strata.backends.reference_ffn import gated as activated
from strata.store.formats import FORMATS

EPS = 1e-2
"""Of norms: large enough to show in a row of small numbers."""


UNGATED = (-1, 0.0, 0.0, 0)


def prepare(
    fmt: str, rows: int, columns: int, tokens: int, per_block: int, add: bool, bias: bool, norm: bool = False
) -> Prepared:
    rng = np.random.default_rng(rows + columns + tokens)
    tensor, matrix = random_matrix(fmt, rows, columns, tokens)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    offsets = rng.standard_normal(rows).astype(np.float32) if bias else None
    factors = rng.uniform(0.5, 1.5, columns).astype(np.float32) if norm else None
    if factors is None:
        expected = bf16_values(bf16_bits(x)).astype(np.float64) @ matrix.T
    else:
        x[-1] *= 0.1
        expected = bf16_values(bf16_bits(x * factors)).astype(np.float64) @ matrix.T
        expected /= np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPS)
    if offsets is not None:
        expected = expected + offsets
    y = unwritten((tokens, rows))
    if add:
        y[:] = rng.standard_normal(y.shape)
        expected = y + 0.5 * expected
    shape = launch_shapes.linear(fmt, rows, tokens, per_block, norm)
    units = tensor.shape.padded_cols // 64
    arguments = (read_only(tensor.data), read_only(x), None if offsets is None else read_only(offsets), y)
    numbers = (rows, columns, units, tokens, per_block, columns, 0, 0.5, int(add))
    last = (None if factors is None else read_only(factors), EPS, *UNGATED)
    tiles = shape.grid[1]
    return Prepared(
        call_of(shape, (*arguments, *numbers, *last)),
        lambda: assert_close(y, expected, 2e-6),
        {(0,): tensor.data.nbytes * tiles},
    )


def gate_up(fmt: str, width: int, columns: int, tokens: int, per_block: int, kind: str) -> Prepared:
    """The first product of a dense FFN: gate and up rows in turn, eight of each."""
    rng = np.random.default_rng(width + columns + tokens)
    tensor, matrix = random_matrix(fmt, -(-width // 8) * 16, columns, tokens)
    x = rng.standard_normal((tokens, columns)).astype(np.float32) * 0.2
    factors = rng.uniform(0.5, 1.5, columns).astype(np.float32)
    both = bf16_values(bf16_bits(x * factors)).astype(np.float64) @ matrix.T
    both /= np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPS)
    pairs = both.reshape(tokens, -1, 2, 8)
    gate, up = (torch.from_numpy(pairs[:, :, i].reshape(tokens, -1)[:, :width].copy()) for i in (0, 1))
    expected = activated(gate, up, Gating(kind, 1.5, 2.0))  # type: ignore[arg-type]
    y = unwritten((tokens, width))
    shape = launch_shapes.linear(fmt, len(matrix), tokens, per_block, True)
    sizes = (len(matrix), columns, tensor.shape.padded_cols // 64, tokens, per_block, columns, 0, 1.0, 0)
    last = (read_only(factors), EPS, GATING_KINDS[kind], 1.5, 2.0, width)
    call = call_of(shape, (read_only(tensor.data), read_only(x), None, y, *sizes, *last))
    return Prepared(call, lambda: assert_close(y, expected.numpy(), 1e-5))


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
    norm: bool = False,
) -> Case:
    title = f"{fmt}-{name}"
    return Case(title, "linear", lambda: prepare(fmt, rows, columns, tokens, per_block, add, bias, norm), ptx)


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
    case("normed", True, "w4g64", 32, 1024, 1, norm=True),
    case("normed-tails", True, "w8", 37, 200, 5, 2, norm=True),
    case("normed-two-tiles", False, "w4g32m", 33, 328, 21, 4, bias=True, norm=True),
    Case("w4g64-gated", "linear", lambda: gate_up("w4g64", 32, 1024, 1, 1, "silu"), True),
    Case("w8-gated-tails", "linear", lambda: gate_up("w8", 20, 200, 11, 2, "gelu_tanh"), True),
    Case("mxfp4-gated-clamped", "linear", lambda: gate_up("mxfp4", 40, 136, 5, 4, "swiglu_clamped")),
    case("normed-add", False, "f16", 16, 136, 9, add=True, norm=True),
]
