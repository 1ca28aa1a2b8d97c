"""Paged decode attention and the joining of its splits, in f64 from what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_pages import FilledPages, fill, turns_bytes
from cases import Case, Prepared, assert_close, call_of
from kv_pages import spec_of
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes


@dataclass(frozen=True)
class Setup:
    """tokens: what each row sees of its sequence; rows_of: the sequence of each row.

    Rows take part from the last to the first, and one row of the batch that is not among them comes first.
    """

    dtype: str
    dim: int
    heads: int
    kv_heads: int
    tokens: tuple[int, ...]
    rows_of: tuple[int, ...]
    splits: int = 1
    window: int = 0
    page_tokens: int = 32
    finished: bool = False  # no partial results
    joins: bool = False  # the last block joins them
    sinks: bool = False

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        return float(self.dim**-0.5)

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        pairs = list(zip(self.tokens, self.rows_of, strict=True))
        return [max(t for t, s in pairs if s == i) for i in range(max(self.rows_of) + 1)]

    def tiles(self, pages: FilledPages) -> np.ndarray:
        """csrc/cuda/attention_common.cuh's RowTile of each row, the last first."""
        rows = range(len(self.tokens))
        tiles = [[1 + r, 1, self.tokens[r] - 1, pages.first_page[self.rows_of[r]]] for r in rows]
        return np.array(tiles[::-1], np.int32)


def decode(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.heads * setup.dim + len(setup.tokens))
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    pages, rows = fill(spec, setup.lengths(), rng), len(setup.tokens)
    q = rng.standard_normal((1 + rows, setup.heads, setup.dim)).astype(np.float32) * 2
    sinks = rng.standard_normal(setup.heads).astype(np.float32) * 2 if setup.sinks else None
    partial = unwritten((rows, setup.heads, setup.splits, setup.dim + 2))
    out = unwritten(q.shape)
    shape = launch_shapes.attention_decode(
        setup.dtype, setup.dim, setup.heads, setup.kv_heads, rows, setup.splits
    )
    inputs = (
        read_only(q),
        pages.table,
        read_only(setup.tiles(pages)),
        None if sinks is None else read_only(sinks),
    )
    tickets = np.zeros((rows, shape.grid[1]), np.uint32)
    outputs: tuple[np.ndarray | None, ...] = (partial, None, None)
    if setup.finished or setup.joins:
        outputs = (None, out, None) if setup.finished else (partial, out, tickets)
    numbers = (setup.heads, setup.kv_heads, setup.page_tokens, pages.layer_at, setup.window, setup.splits)
    call = call_of(shape, (*inputs, *outputs, *numbers, setup.scale), pages.reached)

    def check() -> None:
        assert not tickets.any() and np.isnan(out[0]).all()
        whole = setup.finished or setup.joins
        for row, (end, sequence) in enumerate(zip(setup.tokens, setup.rows_of, strict=True)):
            for head in range(setup.heads):
                kv = head // (setup.heads // setup.kv_heads)
                query = q[1 + row, head].astype(np.float64) * setup.scale
                sink = None if sinks is None else float(sinks[head])
                expected = pages.attention(query, sequence, kv, end, setup.window, sink)
                found = out[1 + row, head] if whole else joined(partial[rows - 1 - row, head])
                assert_close(found, expected, 1.5e-2)

    reached = range(len(call.arguments), len(call.arguments) + len(pages.reached))
    return Prepared(call, check, {tuple(reached): _visible_bytes(setup)})


def _visible_bytes(setup: Setup) -> int:
    """Once per group of eight query heads."""
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    begins = [max(0, end - setup.window) if setup.window else 0 for end in setup.tokens]
    per_head = sum(turns_bytes(spec, end, begin) for end, begin in zip(setup.tokens, begins, strict=True))
    return per_head * setup.kv_heads * -(-setup.heads // setup.kv_heads // launch_shapes.ATTENTION_QUERIES)


def joined(splits: np.ndarray) -> np.ndarray:
    """`[splits, dim + 2]` -> `[dim]`, as attention_combine does without sinks."""
    factors = np.exp2(splits[:, -2].astype(np.float64) - splits[:, -2].max())
    return (splits[:, :-2] * factors[:, None]).sum(axis=0) / (splits[:, -1] * factors).sum()


def combine(rows: int, heads: int, dim: int, splits: int, sinks: bool) -> Prepared:
    rng = np.random.default_rng(dim + splits)
    partial = rng.standard_normal((rows, heads, splits, dim + 2)).astype(np.float32)
    partial[..., -2] *= 4
    partial[..., -1] = rng.uniform(0.5, 9, partial.shape[:-1])
    if splits > 2:
        partial[:, :, 1, :-2], partial[:, :, 1, -2], partial[:, :, 1, -1] = 0.0, -1e30, 0.0  # an empty split
    logits = rng.standard_normal(heads).astype(np.float32) * 2 if sinks else None
    out = unwritten((1 + rows, heads, dim))
    tiles = np.array([[rows - row, 1, 0, 0] for row in range(rows)], np.int32)
    shifted = np.exp2(partial[..., -2].astype(np.float64))
    weights = (partial[..., -1] * shifted).sum(axis=2)
    if logits is not None:
        weights = weights + np.exp(logits.astype(np.float64))
    expected = (partial[..., :-2] * shifted[..., None]).sum(axis=2) / weights[..., None]
    shape = launch_shapes.attention_combine(heads, rows, dim)
    inputs = (read_only(partial), read_only(tiles), None if logits is None else read_only(logits))

    def check() -> None:
        assert np.isnan(out[0]).all()
        assert_close(out[:0:-1], expected, 2e-6)

    return Prepared(call_of(shape, (*inputs, out, dim, splits)), check)


def case(name: str, ptx: bool, *arguments: object, **options: object) -> Case:
    setup = Setup(*arguments, **options)  # type: ignore[arg-type]
    file = "attention_decode" if setup.dim in launch_shapes.COMMON_HEADS else "attention_decode_dims"
    return Case(name, file, lambda: decode(setup), ptx)


# 200 tokens are 13 chunks: at least three turns for every warp.
CASES = [
    case("int8", True, "int8", 128, 4, 1, (200,), (0,)),
    case("bf16", True, "bf16", 128, 4, 1, (200,), (0,)),
    case("int8-splits", True, "int8", 64, 16, 2, (70, 1, 33), (0, 1, 2), splits=3),
    case("bf16-splits", False, "bf16", 64, 16, 2, (70, 1, 33), (0, 1, 2), splits=3),
    case("int8-sixteen-queries", False, "int8", 128, 32, 2, (49,), (0,), splits=2),
    case("bf16-twelve-queries", False, "bf16", 64, 12, 1, (49,), (0,)),
    case("int8-window", False, "int8", 64, 2, 2, (150, 20), (0, 1), window=37),
    case("bf16-window", False, "bf16", 64, 2, 2, (150, 20), (0, 1), window=37, splits=2),
    case("int8-many-rows", False, "int8", 64, 7, 1, (60, 61, 62), (0, 0, 0), page_tokens=16),
    case("int8-finished", True, "int8", 64, 6, 2, (60, 17), (0, 1), finished=True, sinks=True),
    case("bf16-finished", False, "bf16", 128, 2, 1, (33,), (0,), finished=True),
    case("int8-joins", True, "int8", 64, 16, 1, (70, 1, 33), (0, 1, 2), splits=3, joins=True, sinks=True),
    case("bf16-joins", True, "bf16", 128, 12, 1, (49, 20), (0, 1), splits=2, joins=True),
    case("int8-joins-many", False, "int8", 64, 2, 1, (90,), (0,), splits=37, joins=True),
    case("int8-80", True, "int8", 80, 6, 2, (50,), (0,)),
    case("bf16-96", True, "bf16", 96, 4, 2, (37,), (0,), splits=2),
    case("int8-16", False, "int8", 16, 4, 2, (37,), (0,)),
    case("bf16-48", False, "bf16", 48, 3, 1, (17, 33), (0, 1)),
    Case("sinks", "attention_combine", lambda: combine(2, 3, 64, 4, True), True),
    Case("wide", "attention_combine", lambda: combine(1, 2, 256, 1, False), True),
]
