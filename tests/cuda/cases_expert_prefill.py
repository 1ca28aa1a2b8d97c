"""Experts of prompts, both halves, against the reference's dequantized experts in f64."""

from __future__ import annotations

import numpy as np
from cases import Case, Prepared, assert_close, bf16_values, call_of
from cases_experts import Setup, expected_down, expected_hidden, rounded
from packed_tokens import UNIT, packed_order, packed_tokens
from runners import read_only, unwritten

from strata.backends.cuda import prefill_shapes
from strata.backends.cuda.launch_shapes import GATING_KINDS
from strata.store.formats import FORMATS

ROWS = 7


def gate_up(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.hidden)
    layout, (records, table, experts) = setup.layout, setup.records()
    x = rng.standard_normal((ROWS, setup.hidden)).astype(np.float32) * 0.2
    token_of_pair = rng.integers(0, ROWS, sum(setup.pairs)).astype(np.int32)
    units, hidden_units = layout.gate_up.padded_cols // UNIT, layout.down.padded_cols // UNIT
    packed, totals = packed_tokens(x, units)
    has_minimum = FORMATS[setup.fmt].minimum
    hidden = unwritten((sum(setup.pairs), layout.slices * hidden_units * UNIT), np.uint16)
    sums = unwritten((*hidden.shape[:1], layout.slices * hidden_units, 4)) if has_minimum else None
    owners = np.repeat(np.arange(len(experts)), setup.pairs)
    expected = np.stack(
        [
            expected_hidden(experts[owner], rounded(x)[token], setup.gating)
            for owner, token in zip(owners, token_of_pair, strict=True)
        ]
    )

    def check() -> None:
        values = np.zeros((len(hidden), layout.slices * hidden_units, UNIT))
        values[:, :, packed_order()] = bf16_values(hidden).reshape(values.shape)
        by_slice = values.reshape(len(hidden), layout.slices, -1)
        found = by_slice[:, :, : layout.slice_width].reshape(expected.shape)
        allowed = 2.0**-8 * np.abs(expected) + 1e-5 * np.abs(expected).max()
        assert (np.abs(found - expected) <= allowed).all(), "hidden is off by more than bf16's rounding"
        assert (by_slice[:, :, layout.slice_width :] == 0).all(), "what fills a unit is not zero"
        if sums is not None:
            halves = values.reshape(*values.shape[:2], 2, UNIT // 2).sum(axis=3)
            zero = np.zeros((*values.shape[:2], 1))
            wanted = np.concatenate([halves, halves.sum(axis=2, keepdims=True), zero], axis=2)
            assert_close(sums, wanted, 1e-5)

    bias = layout.gate_up_bias_offset if layout.biases else 0
    shape = prefill_shapes.expert_gate_up_prefill(
        setup.fmt, layout.slices, hidden_units, len(experts), max(setup.pairs)
    )
    inputs = (read_only(token_of_pair), read_only(packed), read_only(totals) if has_minimum else None)
    arrays = (table, setup.first_pair(), *inputs, hidden, sums)
    sizes = (units, layout.slice_width, layout.slice_bytes, hidden_units, layout.slices, bias)
    numbers = (*sizes, GATING_KINDS[setup.kind], setup.gating.alpha, setup.gating.limit)
    return Prepared(
        call_of(shape, (*arrays, *numbers), records),
        check,
        stream(setup, layout.gate_up.nbytes * layout.slices, len(arrays) + len(numbers)),
    )


def down(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.width)
    layout, (records, table, experts) = setup.layout, setup.records()
    hidden = rng.standard_normal((sum(setup.pairs), setup.width)).astype(np.float32)
    units, has_minimum = layout.down.padded_cols // UNIT, FORMATS[setup.fmt].minimum
    packed, totals = packed_tokens(hidden.reshape(-1, layout.slice_width), units)
    out = unwritten((sum(setup.pairs), setup.hidden))
    owners = np.repeat(np.arange(len(experts)), setup.pairs)
    expected = np.stack(
        [expected_down(experts[o], row) for o, row in zip(owners, rounded(hidden), strict=True)]
    )
    shape = prefill_shapes.expert_down_prefill(setup.fmt, layout.down.blocks, len(experts), max(setup.pairs))
    inputs = (read_only(packed), read_only(totals) if has_minimum else None)
    arrays = (table, setup.first_pair(), *inputs, out)
    bias = layout.down_bias_offset if layout.biases else 0
    numbers = (setup.hidden, units, layout.slices, layout.slice_bytes, layout.down_offset(0), bias)
    return Prepared(
        call_of(shape, (*arrays, *numbers), records),
        lambda: assert_close(out, expected, 2e-6),
        stream(setup, layout.down.nbytes * layout.slices, len(arrays) + len(numbers)),
    )


def stream(setup: Setup, bytes_per_expert: int, first: int) -> dict[tuple[int, ...], int]:
    """Weights are read once per 64 pairs. Biases lie in the record, too: nothing is claimed then."""
    if setup.biases:
        return {}
    tiles = sum(-(-count // prefill_shapes.EXPERT_PAIRS) for count in setup.pairs)
    return {tuple(range(first, first + len(setup.pairs))): tiles * bytes_per_expert}


# 320 columns are five units; 136 and 72 are tails inside a unit, 48 and 24 elements less than one.
GATE_UP = {
    **{f"{fmt}-stages": Setup(fmt, 320, 24, 1, (3, 18)) for fmt in FORMATS},
    "w4g64-many": Setup("w4g64", 136, 72, 1, (3, 70, 0, 9)),
    "mxfp4-biases": Setup("mxfp4", 72, 256, 2, (5, 17), biases=True, kind="swiglu_clamped"),
    "w4g32m-slices": Setup("w4g32m", 64, 256, 2, (9,), kind="gelu_tanh"),
    "w4g128-slices": Setup("w4g128", 72, 256, 2, (4,)),
}
DOWN = {
    **{f"{fmt}-stages": Setup(fmt, 40, 320, 1, (3, 18)) for fmt in FORMATS},
    "w4g64-many": Setup("w4g64", 136, 72, 1, (3, 70, 0, 9)),
    "mxfp4-biases": Setup("mxfp4", 72, 136, 1, (5, 17), biases=True),
    "w4g64m-slices": Setup("w4g64m", 32, 256, 2, (9,)),
    "w8-slices": Setup("w8", 24, 256, 2, (20,)),
}
SIMULATED = ("w4g64-stages", "w4g32m-stages", "w4g64m-slices", "mxfp4-biases", "w8-stages", "f16-stages")
CASES = [
    *(Case(n, "expert_gate_up_prefill", lambda s=s: gate_up(s), n in SIMULATED) for n, s in GATE_UP.items()),
    *(Case(n, "expert_down_prefill", lambda s=s: down(s), n in SIMULATED) for n, s in DOWN.items()),
]
