"""Attention of prompts over pages, against f64: chunks at any depth, several sequences, windows, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_pages import FilledPages, attended, fill, turns_bytes
from cases import Case, Prepared, assert_close, call_of
from cases_attention import joined
from kv_pages import spec_of
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.attention_tiles import row_tiles


@dataclass(frozen=True)
class Setup:
    """chunks: (position of the first token, tokens) of each sequence's rows. splits 0: finished results."""

    dtype: str
    dim: int
    heads: int
    kv_heads: int
    chunks: tuple[tuple[int, int], ...]
    window: int = 0
    sinks: bool = False
    page_tokens: int = 32
    splits: int = 0

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        return float(self.dim**-0.5)

    @property
    def per_kv_head(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def tiles(self, pages: FilledPages) -> np.ndarray:
        """As CudaKernels makes them."""
        first_rows = np.cumsum([0, *(count for _, count in self.chunks)])
        sequences = zip(first_rows, self.chunks, pages.first_page, strict=False)
        rows = [(int(row), start, count, page) for row, (start, count), page in sequences]
        return row_tiles(rows, max(1, launch_shapes.PREFILL_ROWS // self.per_kv_head))


def prefill(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.heads * setup.dim + len(setup.chunks))
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    pages = fill(spec, [start + count for start, count in setup.chunks], rng)
    rows = sum(count for _, count in setup.chunks)
    q = rng.standard_normal((rows, setup.heads, setup.dim)).astype(np.float32) * 2
    sinks = rng.standard_normal(setup.heads).astype(np.float32) * 2 if setup.sinks else None
    out, tiles = unwritten((rows, setup.heads, setup.dim)), setup.tiles(pages)
    shape = launch_shapes.attention_prefill(
        setup.dtype, setup.dim, setup.kv_heads, len(tiles), max(1, setup.splits)
    )
    inputs = (read_only(q), pages.table, read_only(tiles), None if sinks is None else read_only(sinks))
    partial = unwritten((rows, setup.heads, setup.splits, setup.dim + 2))
    outputs = (partial, None) if setup.splits else (None, out)
    numbers = (setup.heads, setup.kv_heads, setup.page_tokens, pages.layer_at, setup.window)
    ends = (max(1, setup.splits), 0, setup.scale)
    call = call_of(shape, (*inputs, *outputs, *numbers, *ends), pages.reached)
    reached = range(len(call.arguments), len(call.arguments) + len(pages.reached))
    expected = attended(pages, setup.chunks, q * np.float64(setup.scale), setup.window, sinks)
    streams = {tuple(reached): _visible_bytes(setup, tiles)}

    def check() -> None:
        parts = [[joined(head) for head in row] for row in partial] if setup.splits else out
        assert_close(np.array(parts), expected, 1.5e-2)

    return Prepared(call, check, streams)


def _visible_bytes(setup: Setup, tiles: np.ndarray) -> int:
    """What the rows of a tile see together, once per tile."""
    spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, setup.page_tokens)
    begins = [max(0, t[2] + 1 - setup.window) if setup.window else 0 for t in tiles]
    turns = [turns_bytes(spec, t[2] + t[1], begin) for t, begin in zip(tiles, begins, strict=True)]
    return setup.kv_heads * int(sum(turns))


def case(name: str, ptx: bool, *arguments: object, **options: object) -> Case:
    setup = Setup(*arguments, **options)  # type: ignore[arg-type]
    return Case(name, f"attention_prefill{_suffix(setup.dim)}", lambda: prefill(setup), ptx)


def _suffix(dim: int) -> str:
    return "" if dim in launch_shapes.COMMON_HEADS else "_dims"


# Tiles of 8 tokens with 8 query heads, 64 with one; a stage is 32 tokens, and three of them are in flight.
CASES = [
    case("int8", True, "int8", 128, 8, 1, ((130, 9),)),
    case("bf16", True, "bf16", 128, 8, 1, ((130, 9),)),
    case("int8-sequences", True, "int8", 64, 4, 2, ((0, 19), (70, 3)), sinks=True),
    case("bf16-sequences", False, "bf16", 64, 4, 2, ((0, 19), (70, 3)), sinks=True, page_tokens=16),
    case("int8-window", False, "int8", 64, 6, 2, ((150, 23),), window=37),
    case("bf16-window", True, "bf16", 64, 6, 2, ((150, 23),), window=37),
    case("int8-one-head", False, "int8", 64, 2, 2, ((7, 70),)),
    case("bf16-sixteen-heads", False, "bf16", 64, 16, 1, ((33, 5),), page_tokens=48),
    case("int8-splits", True, "int8", 64, 4, 2, ((130, 19),), splits=3),
    case("bf16-splits", False, "bf16", 64, 8, 1, ((33, 11),), splits=4, window=30),
    case("int8-80", True, "int8", 80, 6, 2, ((40, 18),)),
    case("bf16-96", True, "bf16", 96, 4, 2, ((20, 17),)),
    case("int8-16", False, "int8", 16, 4, 2, ((35, 20),), sinks=True),
    case("bf16-48", False, "bf16", 48, 3, 1, ((0, 17), (33, 3))),
]
