"""Paged decode attention and the joining of its splits, in f64 from what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import Case, Prepared, assert_close, call_of
from kv_pages import layer_bytes, meaning, parts_of, random_parts, spec_of
from runners import Pointers, read_only, unwritten

from strata.backends.cuda import launch_shapes

LAYER = 1


@dataclass(frozen=True)
class Setup:
    """tokens: what each row sees of its sequence; rows_of: the sequence of each row."""

    dtype: str
    dim: int
    heads: int
    kv_heads: int
    tokens: tuple[int, ...]
    rows_of: tuple[int, ...]
    splits: int = 1
    window: int = 0
    page_tokens: int = 32
    start: int | None = None  # rows are successive tokens of one sequence, without tables


def decode(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.heads * setup.dim + len(setup.tokens))
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    lengths = [
        max(t for t, s in zip(setup.tokens, setup.rows_of, strict=True) if s == i)
        for i in range(max(setup.rows_of) + 1)
    ]
    counts = [-(-length // setup.page_tokens) for length in lengths]
    parts = [random_parts(spec, rng) for _ in range(sum(counts))]
    pages = [np.full(spec.page_bytes, 0xFF, np.uint8) for _ in parts]
    for page, part in zip(pages, parts, strict=True):
        page[LAYER * spec.layer_bytes :] = layer_bytes(spec, part)
    starts = np.cumsum([0, *counts[:-1]])
    for start, length in zip(starts, lengths, strict=True):
        _forget_behind_the_end(setup, pages, int(start), length)
    order = rng.permutation(len(pages))
    table = Pointers(tuple(int(np.flatnonzero(order == i)[0]) for i in range(len(pages))))
    rows = len(setup.tokens)
    q = rng.standard_normal((rows, setup.heads, setup.dim)).astype(np.float32) * 2
    scale = setup.dim**-0.5
    partial = unwritten((rows, setup.heads, setup.splits, setup.dim + 2))
    first = read_only(np.array([starts[s] for s in setup.rows_of], np.int32))
    ends = read_only(np.array(setup.tokens, np.int32))
    tables = (first, ends) if setup.start is None else (None, None)
    shape = launch_shapes.attention_decode(
        setup.dtype, setup.dim, setup.heads, setup.kv_heads, rows, setup.splits
    )
    call = call_of(
        shape,
        (
            *(read_only(q), table, *tables, partial),
            *(
                setup.heads,
                setup.kv_heads,
                setup.page_tokens,
                LAYER * spec.layer_bytes,
                setup.window,
                setup.splits,
                setup.start or 0,
                scale,
            ),
        ),
        tuple(read_only(pages[i]) for i in order),
    )
    keys = [
        np.concatenate([meaning(p.keys, p.key_scales) for p in parts[a : a + n]], axis=1)
        for a, n in zip(starts, counts, strict=True)
    ]
    values = [
        np.concatenate([meaning(p.values, p.value_scales) for p in parts[a : a + n]], axis=1)
        for a, n in zip(starts, counts, strict=True)
    ]

    def check() -> None:
        for row, (end, sequence) in enumerate(zip(setup.tokens, setup.rows_of, strict=True)):
            begin = max(0, end - setup.window) if setup.window else 0
            for head in range(setup.heads):
                kv = head // (setup.heads // setup.kv_heads)
                scores = keys[sequence][kv, begin:end] @ q[row, head] * scale
                expected = _softmax(scores) @ values[sequence][kv, begin:end]
                assert_close(_joined(partial[row, head]), expected, 1.5e-2)

    reached = range(len(call.arguments), len(call.arguments) + len(pages))
    return Prepared(call, check, {tuple(reached): _visible_bytes(setup)})


def _visible_bytes(setup: Setup) -> int:
    """Keys, values and scales of whole turns of 16 tokens, once per group of eight query heads."""
    turns = 0
    for end in setup.tokens:
        begin = max(0, end - setup.window) if setup.window else 0
        turns += -(-end // 16) - begin // 16
    per_token = 2 * (setup.dim + 4 if setup.dtype == "int8" else 2 * setup.dim)
    groups = -(-setup.heads // setup.kv_heads // 8)
    return turns * 16 * per_token * setup.kv_heads * groups


def _forget_behind_the_end(setup: Setup, pages: list[np.ndarray], start: int, length: int) -> None:
    """The tokens of the last page that nothing wrote hold NaN (0xff bytes), scales included."""
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    last, used = start + length // setup.page_tokens, length % setup.page_tokens
    if not used:
        return
    block = pages[last][LAYER * spec.layer_bytes :]
    parts = parts_of(spec, block.copy())
    arrays = [parts.keys, parts.values, parts.key_scales, parts.value_scales]
    for i, array in enumerate(arrays):
        arrays[i] = array.copy()
        arrays[i][:, used:] = -1 if array.dtype == np.int8 else 0xFFFF if array.dtype == np.uint16 else np.nan
    block[:] = layer_bytes(spec, type(parts)(*arrays))


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def _joined(splits: np.ndarray) -> np.ndarray:
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
    out = unwritten((rows, heads, dim))
    shifted = np.exp2(partial[..., -2].astype(np.float64))
    weights = (partial[..., -1] * shifted).sum(axis=2)
    if logits is not None:
        weights = weights + np.exp(logits.astype(np.float64))
    expected = (partial[..., :-2] * shifted[..., None]).sum(axis=2) / weights[..., None]
    shape = launch_shapes.attention_combine(heads, rows, dim)
    arguments = (read_only(partial), None if logits is None else read_only(logits), out, dim, splits)
    return Prepared(call_of(shape, arguments), lambda: assert_close(out, expected, 2e-6))


def case(name: str, ptx: bool, *arguments: object, **options: object) -> Case:
    return Case(name, "attention_decode", lambda: decode(Setup(*arguments, **options)), ptx)  # type: ignore[arg-type]


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
    case("int8-successive", False, "int8", 64, 4, 2, (61, 62, 63), (0, 0, 0), splits=2, start=60),
    case("int8-many-rows", False, "int8", 64, 7, 1, (60, 61, 62), (0, 0, 0), page_tokens=16),
    Case("sinks", "attention_combine", lambda: combine(2, 3, 64, 4, True), True),
    Case("wide", "attention_combine", lambda: combine(1, 2, 256, 1, False), True),
]
