"""Source blocks read in pieces: any piece of any block is what numpy's own indexing gives."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
from fakes import FakeSource, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.store.convert import convert
from strata.store.formats import FORMATS
from strata.store.options import ConvertOptions
from strata.store.pack import dequantize
from strata.store.quantize import quantize
from strata.store.rows import BlockRows, ValueGuard, format_kept
from strata.store.source import QuantizedRows, SourceRows, TargetTensor, TensorInfo
from strata.store.stacking import InterleavedRows, StackedRows, interleave

SHAPE = (3, 10, 64)  # experts, rows, columns


@st.composite
def blocks(draw: st.DrawFn, whole_rows: bool = False) -> SourceRows:
    """A block inside SHAPE; `whole_rows`: without cuts or transposition."""
    start, stop = sorted(draw(st.tuples(st.integers(0, 29), st.integers(0, 29))))
    stride = draw(st.integers(1, 4))
    count = len(range(start, stop + 1, stride))
    cuts = {}
    if not whole_rows:
        first, last = sorted(draw(st.tuples(st.integers(0, 63), st.integers(0, 63))))
        cuts = {"col_start": first, "col_stop": last + 1, "col_stride": draw(st.integers(1, 4))}
        cuts["transposed"] = draw(st.booleans())
        if cuts["transposed"]:
            count = len(range(first, last + 1, cuts["col_stride"]))
    order = draw(st.none() | st.permutations(range(count)).map(tuple))
    return SourceRows("x", start, stop + 1, stride, row_order=order, **cuts)


def indexed(values: np.ndarray, block: SourceRows) -> np.ndarray:
    flat = values.reshape(-1, values.shape[-1])
    cols = slice(block.col_start, block.col_stop, block.col_stride)
    found = flat[block.start : block.stop : block.stride, cols]
    found = found.T if block.transposed else found
    return found if block.row_order is None else found[list(block.row_order)]


@given(blocks(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_piece_of_any_block(block: SourceRows, data: st.DataObject) -> None:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    rows = BlockRows(FakeSource({"x": values}), block, ValueGuard(allow_nan=False))
    expected = indexed(values, block)
    assert (rows.count, rows.cols) == expected.shape
    start = data.draw(st.integers(0, rows.count - 1))
    stop = data.draw(st.integers(start + 1, rows.count))
    assert np.array_equal(rows.floats(start, stop), expected[start:stop])


@given(blocks(whole_rows=True), st.sampled_from(["w4g32", "w4g32m", "w8g32", "mxfp4"]), st.data())
@settings(max_examples=80, deadline=None)
def test_kept_rows_are_the_same_rows(block: SourceRows, name: str, data: st.DataObject) -> None:
    """gpt-oss's gate is every second row of a quantized tensor, GGUF's llama q is permuted."""
    fmt = FORMATS[name]
    codes = quantize(np.random.default_rng(0).standard_normal((30, 64)).astype(np.float32), fmt, "")
    assert codes.scales is not None
    values = dequantize(fmt, codes)
    kept = QuantizedRows(name, codes.values, codes.scales, codes.minimums)
    source = FakeSource({"x": values.reshape(SHAPE)}, kept={"x": kept})
    assert format_kept(source, block, {}) == name
    rows = BlockRows(source, block, ValueGuard(allow_nan=False))
    start = data.draw(st.integers(0, rows.count - 1))
    stop = data.draw(st.integers(start + 1, rows.count))
    expected = indexed(values.reshape(SHAPE), block)[start:stop]
    assert np.array_equal(dequantize(fmt, rows.kept(start, stop)), expected)


def test_blocks_that_cannot_be_kept() -> None:
    values = np.zeros((4, 64), np.float32)
    kept = QuantizedRows("w4g32", np.zeros((4, 64), np.uint8), np.zeros((4, 2), np.float16))
    source = FakeSource({"x": values}, kept={"x": kept})
    for cut in ({"transposed": True}, {"col_start": 32}, {"col_stop": 32}, {"col_stride": 2}):
        assert format_kept(source, SourceRows("x", **cut), {}) is None
    assert format_kept(source, SourceRows("x", col_stop=64), {}) == "w4g32"


@given(st.integers(1, 40), st.integers(1, 3))
def test_stacked_and_interleaved_pieces(width: int, parts: int) -> None:
    rng = np.random.default_rng(width)
    arrays = {name: rng.standard_normal((width, 8)).astype(np.float32) for name in ("gate", "up", "more")}
    source, guard = FakeSource(arrays), ValueGuard(allow_nan=False)
    gate, up, more = (BlockRows(source, SourceRows(name), guard) for name in arrays)
    stacked = StackedRows([gate, up, more][:parts])
    whole = np.concatenate(list(arrays.values())[:parts])
    for start in range(0, stacked.count, 7):
        stop = min(start + 7, stacked.count)
        assert np.array_equal(stacked.floats(start, stop), whole[start:stop])
    both = InterleavedRows(gate, up, 0, width, 0)
    expected = interleave((arrays["gate"], arrays["up"]), 0)
    assert both.count == len(expected)
    for start in range(0, both.count, 16):
        stop = min(start + 16, both.count)
        assert np.array_equal(both.floats(start, stop), expected[start:stop])
    for row in range(width):
        at = row // 8 * 16 + row % 8
        assert np.array_equal(expected[at], arrays["gate"][row])
        assert np.array_equal(expected[at + 8], arrays["up"][row])


class EndlessSource(FakeSource):
    """A tensor of 40,000 x 2,048 whose rows are made when read (82 M values, 328 MB as f32)."""

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {"x": TensorInfo("x", "BF16", (40_000, 2048), 40_000 * 4096, self.path, 0)}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.full((stop - start, 2048), 0.5, np.float32)


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """Embeddings of gigabytes pass through in pieces of 16 MiB of f32 (measured peak: 105 MB)."""
    target = TargetTensor("embed.weight", (SourceRows("x"),), (40_000, 2048), "embed")
    tracemalloc.start()
    try:
        convert(EndlessSource({}), small_spec(), [target], [], tmp_path / "s", ConvertOptions(threads=2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200e6
