"""Rows of the report for prompts: 512 tokens, matrices and experts of Qwen3-30B-A3B."""

from __future__ import annotations

import cases_expert_prefill
import cases_linear_prefill
import cases_w8a8
from cases_experts import Setup
from report import Row

from strata.backends.cuda import prefill_shapes

TOKENS, HIDDEN, WIDTH, EXPERTS, PAIRS = 512, 2048, 768, 128, 32
"""PAIRS: of one expert, on average (8 of 128 experts per token)."""
UNIT_ROWS = 128
"""Rows that a block of eight warps takes, one row block each."""


def _linear(fmt: str, rows: int, columns: int, bits: float) -> Row:
    at_once, passes = prefill_shapes.prefill_tokens(fmt), 2 if fmt == "f16" else 1
    setup = cases_linear_prefill.Setup(fmt, UNIT_ROWS, columns, at_once, warps=8)
    return Row(
        f"{fmt}, {rows:,} x {columns:,}, {TOKENS} tokens",
        lambda: cases_linear_prefill.linear(setup),
        rows / UNIT_ROWS * TOKENS / at_once,
        int(rows * columns * bits / 8) + TOKENS * (2 * columns + 4 * rows),
        True,
        passes * TOKENS * rows * columns,
    )


def _w8a8(rows: int, columns: int) -> Row:
    block_rows, at_once = 2 * UNIT_ROWS, 64
    tiles = TOKENS // at_once
    return Row(
        f"w8, {rows:,} x {columns:,}, {TOKENS} tokens",
        lambda: cases_w8a8.linear(cases_w8a8.Setup(block_rows, columns, at_once, warps=8)),
        rows // block_rows * tiles,
        rows * columns + TOKENS * (columns + 4 * rows),
        True,
        TOKENS * rows * columns / 4,
    )


def _w8a8_few(rows: int, columns: int) -> Row:
    small = 64
    return Row(
        f"w8, {rows:,} x {columns:,}, 1 token",
        lambda: cases_w8a8.linear(cases_w8a8.Setup(small, columns, 1)),
        rows // small,
        rows * columns + columns + 4 * rows,
    )


def _experts() -> list[Row]:
    name = f"w4g64, {EXPERTS} experts of {HIDDEN:,} x {WIDTH}, {PAIRS} tokens each"
    weights, pairs = int(EXPERTS * WIDTH * HIDDEN * 4.25 / 8), EXPERTS * PAIRS
    products = pairs * HIDDEN * WIDTH
    elements = 64  # of hidden, for which a block computes gate and up
    gate_up, down = (
        Setup("w4g64", HIDDEN, elements, 1, (PAIRS,)),
        Setup("w4g64", UNIT_ROWS, WIDTH, 1, (PAIRS,)),
    )
    moved = pairs * 2 * (HIDDEN + WIDTH)
    return [
        Row(
            name,
            lambda: cases_expert_prefill.gate_up(gate_up),
            EXPERTS * WIDTH // elements,
            2 * weights + moved,
            products=2 * products,
        ),
        Row(
            name,
            lambda: cases_expert_prefill.down(down),
            EXPERTS * HIDDEN // UNIT_ROWS,
            weights + moved + pairs * 2 * HIDDEN,
            products=products,
        ),
    ]


PREFILL_ROWS = [
    Row(
        f"{TOKENS} tokens of {HIDDEN:,}",
        lambda: cases_linear_prefill.packing(2, HIDDEN, HIDDEN // 64, False),
        TOKENS // 2,
        TOKENS * HIDDEN * 6,
    ),
    *(
        _linear(fmt, 5120, HIDDEN, bits)
        for fmt, bits in (("w4g128", 4.125), ("w4g64m", 4.5), ("w8", 8), ("bf16", 16), ("f16", 16))
    ),
    _linear("mxfp4", 5120, 2880, 4.25),
    *_experts(),
    Row(
        f"{TOKENS} tokens of {HIDDEN:,}",
        lambda: cases_w8a8.quantizing(2, HIDDEN, HIDDEN // 64),
        TOKENS // 2,
        TOKENS * HIDDEN * 5,
    ),
    _w8a8_few(5120, HIDDEN),
    _w8a8(5120, HIDDEN),
]
