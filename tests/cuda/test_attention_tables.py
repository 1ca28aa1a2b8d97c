"""Which rows go where, and which pages attention's kernels know."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pages import latent_spec, spec_of

from strata.backends.base import KvSpec, group_of
from strata.backends.cuda.attention import (
    GROUPED_DIMS,
    HEAD_DIMS,
    LATENT_DIMS,
    PAGE_DTYPES,
    WIDE_DIMS,
    require_attention,
)
from strata.backends.cuda.attention_tiles import SINGLE_TOKENS, batch_tables
from strata.backends.cuda.launch_shapes import GROUPED_ELEMENTS
from strata.backends.cuda.sources import kernel_source
from strata.core import Batch, Sequence
from strata.device.buffers import Allocation
from strata.errors import UnsupportedError


def batch_of(chunks: list[tuple[int, int]]) -> Batch:
    """chunks: (tokens that a sequence has, tokens that it gets)."""
    none = np.zeros(0, np.int32)
    firsts = np.cumsum([0, *(count for _, count in chunks)])
    sequences = [
        Sequence(int(row), count, start, none) for row, (start, count) in zip(firsts, chunks, strict=False)
    ]
    positions = [start + k for start, count in chunks for k in range(count)]
    rows = np.array(positions, np.int32)
    return Batch(rows, rows, tuple(sequences), none)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_every_row_is_in_one_tile(chunks: list[tuple[int, int]], most: int) -> None:
    made: dict[str, np.ndarray] = {}

    def pinned(values: np.ndarray, what: str) -> object:
        made[what] = values
        return Allocation("host", 256, values.nbytes, what)

    pages = [-(-(start + count) // 16) for start, count in chunks]
    batch_tables(batch_of(chunks), pages, most, pinned)  # type: ignore[arg-type]
    limits = {"rows of single tokens": 1, "tiles of prompts": most}
    covered: list[int] = []
    for what, limit in limits.items():
        for row, tokens, position, page in made.get(what, np.zeros((0, 4), np.int32)):
            assert 1 <= tokens <= limit
            rows = range(row, row + tokens)
            assert made["positions of rows"][list(rows)].tolist() == list(range(position, position + tokens))
            assert (made["first pages of rows"][list(rows)] == page).all()
            covered += rows
    assert sorted(covered) == list(range(sum(count for _, count in chunks)))
    if "rows of a prompt" in made:
        assert made["rows of a prompt"][:, :2].tolist() == [[row, 1] for row in range(chunks[0][1])]
    short = sum(count for _, count in chunks if count <= SINGLE_TOKENS)
    assert len(made.get("rows of single tokens", ())) == short


@pytest.mark.parametrize(
    ("spec", "per_kv_head"),
    [
        (spec_of("int8", 1, 100, 32), 1),
        (spec_of("f32", 1, 64, 32), 1),
        (spec_of("bf16", 1, 128, 24), 1),
        (spec_of("bf16", 1, 64, 32), 71),
        (latent_spec("int8", 256, 64, 32), 16),
        (latent_spec("int8g64", 512, 64, 32), 16),
        (spec_of("int8g32", 1, 80, 32), 1),
        (KvSpec(1, 1, 64, 64, 32, "int8t", steps=((1.0, 1.0),)), 1),
    ],
)
def test_pages_without_kernels_are_refused(spec: KvSpec, per_kv_head: int) -> None:
    with pytest.raises(UnsupportedError, match="on a GPU"):
        require_attention(spec, per_kv_head)


@pytest.mark.parametrize(
    ("files", "entry", "dims"),
    [
        (("attention_decode", "attention_decode_dims"), r"ATTENTION_DECODE\((\w+), (\d+),", HEAD_DIMS),
        (("attention_prefill", "attention_prefill_dims"), r"ATTENTION_PREFILL\((\w+), (\d+),", HEAD_DIMS),
        (("attention_wide",), r"ATTENTION_WIDE\(attention_wide_(\w+)_(\d+),", WIDE_DIMS),
        (("attention_latent",), r"ATTENTION_WIDE\(attention_latent_(\w+)_(\d+),", LATENT_DIMS[:1]),
    ],
)
def test_what_is_not_refused_has_kernels(files: tuple[str, ...], entry: str, dims: tuple[int, ...]) -> None:
    found = [
        pair for file in files for pair in re.findall("^" + entry, kernel_source(file).text, re.MULTILINE)
    ]
    assert sorted(found) == sorted((dtype, str(dim)) for dtype in ("int8", "bf16") for dim in dims)


def test_every_size_of_grouped_heads_has_a_kernel() -> None:
    text = kernel_source("attention_grouped").text
    found = re.findall(r"^ATTENTION_GROUPED\(attention_grouped_(\d+), (\d+), (\d+)\)", text, re.MULTILINE)
    assert found == [(str(dim), str(dim), str(dim // GROUPED_ELEMENTS)) for dim in GROUPED_DIMS]
    assert {dtype for dtype in PAGE_DTYPES if group_of(dtype)} == {"int8g128", "int8g64", "int8g32"}
