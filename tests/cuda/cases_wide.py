"""Attention with wide heads, latent ones above all, against f64: single rows in splits, prompts by tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_pages import FilledPages, attended, fill, turns_bytes
from cases import Case, Prepared, assert_close, call_of
from cases_attention import joined
from kv_pages import latent_spec, spec_of
from runners import read_only, unwritten

from strata.backends.base import KvSpec
from strata.backends.cuda import launch_shapes
from strata.backends.cuda.attention_tiles import row_tiles

RANK, ROPE = 512, 64


@dataclass(frozen=True)
class Setup:
    """dim: of keys, 576 for latent ones. chunks as in cases_prefill. splits 0: results are finished."""

    dtype: str
    dim: int
    heads: int
    kv_heads: int
    chunks: tuple[tuple[int, int], ...]
    splits: int = 0
    window: int = 0
    sinks: bool = False

    @property
    def latent(self) -> bool:
        """Whether values are in the keys."""
        return self.dim == RANK + ROPE

    @property
    def spec(self) -> KvSpec:
        """Of the pages."""
        if self.latent:
            return latent_spec(self.dtype, RANK, ROPE, 32)
        return spec_of(self.dtype, self.kv_heads, self.dim, 32)

    def tiles(self, pages: FilledPages) -> np.ndarray:
        """As CudaKernels makes them."""
        most = 1 if self.splits else max(1, launch_shapes.WIDE_ROWS // (self.heads // self.kv_heads))
        rows = np.cumsum([0, *(count for _, count in self.chunks)])
        sequences = zip(rows, self.chunks, pages.first_page, strict=False)
        return row_tiles([(int(row), start, count, page) for row, (start, count), page in sequences], most)


def prepare(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.heads * setup.dim + len(setup.chunks))
    spec = setup.spec
    pages = fill(spec, [start + count for start, count in setup.chunks], rng)
    rows, tiles = sum(count for _, count in setup.chunks), setup.tiles(pages)
    q = rng.standard_normal((rows, setup.heads, setup.dim)).astype(np.float32) * 2
    sinks = rng.standard_normal(setup.heads).astype(np.float32) * 2 if setup.sinks else None
    finished = unwritten((rows, setup.heads, spec.value_dim))
    partial = unwritten((len(tiles), setup.heads, setup.splits, spec.value_dim + 2))
    shape = _shape(setup, len(tiles))
    inputs = (read_only(q), pages.table, read_only(tiles), None if sinks is None else read_only(sinks))
    outputs = (partial, None) if setup.splits else (None, finished)
    numbers = (setup.heads, setup.kv_heads, spec.page_tokens, pages.layer_at, setup.window)
    scale = float(setup.dim**-0.5)
    last = (max(1, setup.splits), scale, *((spec.group,) if spec.group else ()))
    call = call_of(shape, (*inputs, *outputs, *numbers, *last), pages.reached)
    expected = attended(pages, setup.chunks, q * np.float64(scale), setup.window, sinks)

    def check() -> None:
        found = finished
        if setup.splits:  # tiles are rows then
            found = np.array([[joined(head) for head in row] for row in partial])
        assert_close(found, expected, 1.5e-2)

    reached = range(len(call.arguments), len(call.arguments) + len(pages.reached))
    return Prepared(call, check, {tuple(reached): _visible_bytes(setup, tiles)})


def _shape(setup: Setup, tiles: int) -> launch_shapes.LaunchShape:
    rest = (setup.heads, setup.kv_heads, tiles, max(1, setup.splits))
    if setup.spec.group:
        return launch_shapes.attention_grouped(setup.dim, *rest)
    return launch_shapes.attention_wide(setup.dtype, setup.dim, setup.latent, *rest)


def _visible_bytes(setup: Setup, tiles: np.ndarray) -> int:
    """Once per tile and group of query heads."""
    begins = [max(0, t[2] + 1 - setup.window) if setup.window else 0 for t in tiles]
    turns = [turns_bytes(setup.spec, t[2] + t[1], begin) for t, begin in zip(tiles, begins, strict=True)]
    groups = -(-setup.heads // setup.kv_heads // launch_shapes.WIDE_ROWS)
    return groups * setup.kv_heads * int(sum(turns))


def case(name: str, ptx: bool, *arguments: object, **options: object) -> Case:
    setup = Setup(*arguments, **options)  # type: ignore[arg-type]
    file = "attention_latent" if setup.latent else "attention_wide"
    if setup.spec.group:
        file = "attention_grouped"
    return Case(name, file, lambda: prepare(setup), ptx)


CASES = [
    case("int8-splits", True, "int8", 576, 4, 1, ((79, 1),), splits=2),
    case("bf16-splits", False, "bf16", 576, 3, 1, ((52, 1), (0, 1)), splits=2),
    case("int8-prompt", False, "int8", 576, 4, 1, ((35, 6),)),
    case("bf16-prompt", True, "bf16", 576, 4, 1, ((35, 6),)),
    case("int8-many-heads", False, "int8", 576, 20, 1, ((20, 2),)),
    case("int8-256-splits", False, "int8", 256, 2, 1, ((62, 1),), splits=2, window=40),
    case("bf16-256-splits", True, "bf16", 256, 16, 2, ((52, 1), (0, 1)), splits=2),
    case("int8g32-128-splits", True, "int8g32", 128, 16, 2, ((52, 1), (0, 1)), splits=2),
    case("int8g64-128-prompt", False, "int8g64", 128, 4, 2, ((35, 7), (0, 3)), sinks=True),
    case("int8g64-96-prompt", False, "int8g64", 96, 3, 1, ((20, 9),), window=15),
    case("int8g32-64-splits", False, "int8g32", 64, 3, 1, ((62, 1),), splits=2, window=40),
    case("int8g128-192-prompt", False, "int8g128", 192, 2, 1, ((35, 5),)),
    case("int8g128-256-splits", False, "int8g128", 256, 2, 1, ((40, 1),), splits=2),
    case("int8-192-prompt", True, "int8", 192, 6, 2, ((35, 7), (0, 3)), sinks=True),
    case("bf16-192-prompt", False, "bf16", 192, 6, 2, ((50, 7),), window=30, sinks=True),
]
