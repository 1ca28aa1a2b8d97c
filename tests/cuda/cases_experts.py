"""Both halves of routed experts and their combination, against the reference's dequantized experts in f64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from packed_weights import random_record
from runners import Pointers, Words, read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.expert_tables import NEAR_WORDS
from strata.backends.cuda.launch_shapes import GATING_KINDS
from strata.backends.parts import Gating
from strata.backends.reference_ffn import Expert, expert_of, gated, separate
from strata.store.formats import FORMATS, ExpertLayout

TOKENS = 11


@dataclass(frozen=True)
class Choice:
    """Of each pair: its token, and the router's weight."""

    token_of_pair: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Setup:
    """pairs: how many tokens each expert has, in the launch's order. far: tables are in global memory."""

    fmt: str
    hidden: int
    width: int
    slices: int
    pairs: tuple[int, ...]
    biases: bool = False
    kind: str = "silu"
    far: bool = False

    @property
    def layout(self) -> ExpertLayout:
        fmt = FORMATS[self.fmt]
        return ExpertLayout(fmt, fmt, self.hidden, self.width, self.slices, self.biases)

    @property
    def gating(self) -> Gating:
        return Gating(self.kind, 1.5, 2.0)  # type: ignore[arg-type]

    def records(self) -> tuple[tuple[np.ndarray, ...], Pointers, list[Expert]]:
        """Records in slots of any order, the table of their addresses, and the experts."""
        records = [read_only(random_record(self.layout, seed)) for seed in range(len(self.pairs))]
        table = Pointers(tuple(reversed(range(len(records)))))
        experts = [expert_of(record, self.layout, torch.float64) for record in records]
        return tuple(reversed(records)), table, experts

    def first_pair(self) -> np.ndarray:
        return read_only(np.concatenate([[0], np.cumsum(self.pairs)]).astype(np.int32))

    def choice(self) -> Choice:
        """Whose rows the pairs are, and their weights."""
        rng = np.random.default_rng(len(self.pairs))
        tokens = rng.integers(0, TOKENS, sum(self.pairs))
        return Choice(tokens, rng.uniform(0, 1, len(tokens)).astype(np.float32))

    def tables(self, choice: Choice) -> tuple[Words | None, Words]:
        """csrc/cuda/expert_words.cuh's two arguments."""
        order = np.argsort(choice.token_of_pair, kind="stable")
        firsts = np.searchsorted(choice.token_of_pair[order], np.arange(TOKENS + 1))
        parts = [
            np.zeros(2 * len(self.pairs)),
            np.concatenate([[0], np.cumsum(self.pairs)]),
            choice.token_of_pair,
            order,
            choice.weights[order].view(np.uint32),
            firsts,
        ]
        words = np.concatenate([part.astype(np.uint32) for part in parts])
        targets, empty = tuple(reversed(range(len(self.pairs)))), np.zeros(NEAR_WORDS, np.uint32)
        if self.far:
            return Words(words, targets, far=True), Words(empty)
        return None, Words(np.concatenate([words, empty[len(words) :]]), targets)


def rounded(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bf16_values(bf16_bits(x)).astype(np.float64))


def stream(setup: Setup, bytes_per_expert: int, first: int) -> dict[tuple[int, ...], int]:
    """Weights are read once per tile of tokens. Biases lie in the record, too: nothing is claimed then."""
    if setup.biases:
        return {}
    tile = 8 if max(setup.pairs) <= 8 else 16
    records = tuple(range(first, first + len(setup.pairs)))
    return {records: sum(-(-count // tile) for count in setup.pairs) * bytes_per_expert}


def gate_up(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.hidden)
    layout, (records, _, experts), choice = setup.layout, setup.records(), setup.choice()
    x = rng.standard_normal((TOKENS, setup.hidden)).astype(np.float32) * 0.2
    hidden = unwritten((sum(setup.pairs), setup.width))
    owners = np.repeat(np.arange(len(experts)), setup.pairs)
    expected = np.stack(
        [
            expected_hidden(experts[owner], rounded(x)[token], setup.gating)
            for owner, token in zip(owners, choice.token_of_pair, strict=True)
        ]
    )
    units = layout.gate_up.padded_cols // 64
    bias = layout.gate_up_bias_offset if layout.biases else 0
    gating = (GATING_KINDS[setup.kind], setup.gating.alpha, setup.gating.limit)
    blocks = layout.gate_up.blocks * layout.slices
    shape = launch_shapes.expert_gate_up(setup.fmt, blocks, len(experts), max(setup.pairs))
    arrays = (*setup.tables(choice), read_only(x), hidden)
    numbers = (setup.hidden, units, layout.slice_width, layout.slice_bytes, bias, *gating)
    return Prepared(
        call_of(shape, (*arrays, *numbers), records),
        lambda: assert_close(hidden, expected, 1e-5),
        stream(setup, layout.gate_up.nbytes * layout.slices, len(arrays) + len(numbers)),
    )


def expected_hidden(expert: Expert, x: torch.Tensor, gating: Gating) -> np.ndarray:
    parts = []
    for part in expert.slices:
        both = part.gate_up @ x
        both = both if part.gate_up_bias is None else both + part.gate_up_bias
        parts.append(gated(*separate(both, part.down.shape[1]), gating).numpy())
    return np.concatenate(parts)


def down(setup: Setup, add: bool = True, with_rest: bool = True) -> Prepared:
    rng = np.random.default_rng(setup.width)
    layout, (records, _, experts), choice = setup.layout, setup.records(), setup.choice()
    hidden = rng.standard_normal((sum(setup.pairs), setup.width)).astype(np.float32)
    out = unwritten((sum(setup.pairs), setup.hidden))
    owners = np.repeat(np.arange(len(experts)), setup.pairs)
    expected = np.stack(
        [expected_down(experts[o], row) for o, row in zip(owners, rounded(hidden), strict=True)]
    )
    shape = launch_shapes.expert_down(setup.fmt, layout.down.blocks, len(experts), max(setup.pairs))
    residual = rng.standard_normal((TOKENS, setup.hidden)).astype(np.float32)
    rest = read_only(rng.standard_normal(residual.shape).astype(np.float32)) if with_rest else None
    sums = np.zeros(residual.shape) if rest is None else rest.astype(np.float64)
    np.add.at(sums, choice.token_of_pair, choice.weights[:, None].astype(np.float64) * expected)
    joined = 0.75 * sums + (residual if add else 0.0)
    tickets = np.zeros(shape.grid[0], np.uint32)
    arrays = (*setup.tables(choice), read_only(hidden), out, rest, residual, tickets)
    bias = layout.down_bias_offset if layout.biases else 0
    units = layout.down.padded_cols // 64
    numbers = (
        setup.hidden,
        units,
        layout.slice_width,
        layout.slices,
        layout.slice_bytes,
        layout.down_offset(0),
        bias,
        TOKENS,
        0.75,
        int(add),
    )

    def check() -> None:
        assert_close(out, expected, 2e-6)
        assert_close(residual, joined, 3e-6)
        assert not tickets.any()

    return Prepared(
        call_of(shape, (*arrays, *numbers), records),
        check,
        stream(setup, layout.down.nbytes * layout.slices, len(arrays) + len(numbers)),
    )


def expected_down(expert: Expert, hidden: torch.Tensor) -> np.ndarray:
    total = torch.zeros(expert.slices[0].down.shape[0], dtype=torch.float64)
    width = expert.slices[0].down.shape[1]
    for i, part in enumerate(expert.slices):
        total += part.down @ hidden[i * width : (i + 1) * width]
    return (total if expert.down_bias is None else total + expert.down_bias).numpy()


def combine(columns: int, tokens: int, top_k: int, with_rest: bool, add: bool = True) -> Prepared:
    rng = np.random.default_rng(columns)
    pairs = tokens * top_k
    out = rng.standard_normal((pairs, columns)).astype(np.float32)
    weights = rng.uniform(0, 1, pairs).astype(np.float32)
    order = rng.permutation(pairs).astype(np.int32)
    first = np.arange(0, pairs + 1, top_k).astype(np.int32)
    first[1:-1] -= rng.integers(0, 2, tokens - 1)  # some tokens have fewer experts here
    rest = rng.standard_normal((tokens, columns)).astype(np.float32) if with_rest else None
    residual = rng.standard_normal((tokens, columns)).astype(np.float32)
    sums = np.stack(
        [
            sum(
                (weights[i] * out[order[i]].astype(np.float64) for i in range(first[t], first[t + 1])),
                np.zeros(columns),
            )
            for t in range(tokens)
        ]
    )
    expected = (residual if add else 0.0) + 0.75 * (sums + (rest if rest is not None else 0.0))
    shape = launch_shapes.combine_experts(columns, tokens)
    arrays = (read_only(out), read_only(order), read_only(weights), read_only(first))
    tail = (None if rest is None else read_only(rest), residual, columns // 4, 0.75, int(add))
    return Prepared(call_of(shape, (*arrays, *tail)), lambda: assert_close(residual, expected, 2e-6))


MANY = (3, 1, 16, 21)
# 1,024 columns are four units per warp; 136 and 72 are tails inside a unit.
LONG = {f"{fmt}-long": fmt for fmt in FORMATS}
SETUPS = {
    **{f"{fmt}-many": Setup(fmt, 136, 48, 1, MANY, far=fmt == "mxfp4") for fmt in ("w4g64", "mxfp4")},
    "w4g64-slices": Setup("w4g64", 128, 256, 2, (1, 3), far=True),
    "w4g128-slices": Setup("w4g128", 128, 1280, 2, (4,), kind="gelu_tanh"),
    "mxfp4-biases": Setup("mxfp4", 72, 136, 1, (5, 1, 2), biases=True, kind="swiglu_clamped"),
    "w8-slices": Setup("w8", 64, 128, 2, (2, 1)),
    "w4g32-wide": Setup("w4g32", 64, 256, 1, (9, 2)),
}
SIMULATED = ("w4g64-long", "w4g32m-long", "mxfp4-biases", "w8g32-long", "bf16-long")
CASES = [
    *(
        Case(n, "expert_gate_up", lambda f=f: gate_up(Setup(f, 1024, 16, 1, (2, 8))), n in SIMULATED)
        for n, f in LONG.items()
    ),
    *(
        Case(n, "expert_down", lambda f=f: down(Setup(f, 32, 1024, 1, (2, 8))), n in SIMULATED)
        for n, f in LONG.items()
    ),
    *(Case(n, "expert_gate_up", lambda s=s: gate_up(s), n in SIMULATED) for n, s in SETUPS.items()),
    *(
        Case(n, "expert_down", lambda s=s: down(s), n in (*SIMULATED, "w4g64-slices"))
        for n, s in SETUPS.items()
    ),
    Case("w4g64-first", "expert_down", lambda: down(SETUPS["w4g64-many"], add=False)),
    Case("w8-without-rest", "expert_down", lambda: down(SETUPS["w8-slices"], with_rest=False)),
    Case("with-rest", "combine", lambda: combine(512, 3, 4, True), True),
    Case("first", "combine", lambda: combine(128, 2, 3, True, add=False), True),
    Case("tail", "combine", lambda: combine(516, 2, 8, False), True),
]
