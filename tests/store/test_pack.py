"""The byte layout of formats.py, checked against its sentences spelled out value by value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import StoreError
from strata.store.formats import FORMATS, PackedShape, PackedTensor, WeightFormat
from strata.store.pack import (
    Codes,
    check_padding,
    dequantize,
    pack,
    scale_dtype,
    unpack,
    unpack_codes,
    unpack_rows,
)

formats = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)
sizes = st.tuples(st.integers(1, 40), st.integers(1, 300))


def random_codes(fmt: WeightFormat, rows: int, cols: int, seed: int = 0) -> Codes:
    """Any codes with any finite scales."""
    rng = np.random.default_rng(seed)
    if fmt.values in ("bf16", "f16"):
        numbers = rng.standard_normal((rows, cols)).astype(np.float16)
        bits = (
            numbers.view(np.uint16)
            if fmt.values == "f16"
            else numbers.astype(np.float32).view(np.uint32) >> 16
        )
        return Codes(bits.astype(np.uint16))
    top = 16 if fmt.values in ("int4", "e2m1") else 256
    groups = -(-cols // fmt.group) if fmt.group else 1

    def scales() -> np.ndarray:
        if fmt.scale_bytes == 1:
            return rng.integers(100, 150, (rows, groups)).astype(np.uint8)
        return rng.standard_normal((rows, groups)).astype(scale_dtype(fmt))

    values = rng.integers(0, top, (rows, cols)).astype(np.uint8)
    return Codes(values, scales(), scales() if fmt.minimum else None)


def value_at(shape: PackedShape, data: np.ndarray, row: int, col: int) -> int:
    """A stored value, found by the words of formats.py alone."""
    unit, inside = divmod(col, 64)
    block = data[row // 16 * shape.block_bytes :]
    bits = shape.value_bytes * 8 // (16 * shape.padded_cols)
    units = block[unit * 16 * 64 * bits // 8 :]
    r = row % 16
    if bits == 4:
        chunk, j = divmod(inside, 8)
        byte = int(units[64 * chunk + 4 * r + j % 4])
        return byte >> 4 if j >= 4 else byte & 15
    if bits == 8:
        chunk, j = divmod(inside, 4)
        return int(units[64 * chunk + 4 * r + j])
    chunk, j = divmod(inside, 2)
    at = 64 * chunk + 2 * (2 * r + j)
    return int(units[at]) | int(units[at + 1]) << 8


@given(formats, sizes)
@settings(max_examples=60, deadline=None)
def test_layout_is_the_documented_one(fmt: WeightFormat, size: tuple[int, int]) -> None:
    rows, cols = size
    shape, codes = PackedShape(fmt, rows, cols), random_codes(fmt, rows, cols)
    data = pack(shape, codes)
    rng = np.random.default_rng(1)
    for row, col in zip(rng.integers(0, rows, 30), rng.integers(0, cols, 30), strict=True):
        assert value_at(shape, data, int(row), int(col)) == codes.values[row, col]
    for row, col in ((0, shape.padded_cols - 1), (shape.padded_rows - 1, 0)):
        if row >= rows or col >= cols:
            assert value_at(shape, data, row, col) == fmt.zero_code


@given(formats, sizes)
@settings(max_examples=40, deadline=None)
def test_scales_stand_group_after_group_for_sixteen_rows(fmt: WeightFormat, size: tuple[int, int]) -> None:
    rows, cols = size
    shape, codes = PackedShape(fmt, rows, cols), random_codes(fmt, rows, cols)
    data = pack(shape, codes)
    for part, scales in enumerate((codes.scales, codes.minimums)):
        if scales is None:
            continue
        width = fmt.scale_bytes
        for row in range(rows):
            for group in range(scales.shape[1]):
                offset = row // 16 * shape.block_bytes + shape.value_bytes + part * shape.scale_block_bytes
                offset += (group * 16 + row % 16) * width
                assert data[offset : offset + width].tobytes() == scales[row, group].tobytes()


@given(formats, sizes, st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_packing_loses_nothing(fmt: WeightFormat, size: tuple[int, int], seed: int) -> None:
    rows, cols = size
    shape, codes = PackedShape(fmt, rows, cols), random_codes(fmt, rows, cols, seed)
    tensor = PackedTensor("w", shape, pack(shape, codes))
    assert tensor.data.nbytes == shape.nbytes
    check_padding(tensor)
    found = unpack_codes(shape, tensor.data, 0, shape.blocks)
    assert np.array_equal(found.values[:rows, :cols], codes.values)
    whole = unpack(tensor)
    assert whole.shape == (rows, cols)
    assert np.array_equal(whole, dequantize(fmt, codes), equal_nan=True)
    start, stop = sorted((seed % rows, rows))
    assert np.array_equal(unpack_rows(tensor, start, stop), whole[start:stop], equal_nan=True)


def test_meaning_of_codes() -> None:
    """What formats.py says under "What the values mean"."""
    half = np.full((1, 1), 0.5, np.float16)
    four = np.arange(16, dtype=np.uint8)[None]
    assert dequantize(FORMATS["w4g32"], Codes(four, half)).tolist() == [[(q - 8) / 2 for q in range(16)]]
    minimum = np.full((1, 1), -3, np.float16)
    assert dequantize(FORMATS["w4g32m"], Codes(four, half, minimum))[0, 15] == 4.5
    signed = np.array([[-127, 0, 127]], np.int8).view(np.uint8)
    assert dequantize(FORMATS["w8g32"], Codes(signed, half)).tolist() == [[-63.5, 0, 63.5]]
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e8m0 = np.full((1, 1), 129, np.uint8)
    assert dequantize(FORMATS["mxfp4"], Codes(four[:, :8], e8m0)).tolist() == [[4 * v for v in expected]]
    assert dequantize(FORMATS["mxfp4"], Codes(four[:, 8:], e8m0)).tolist() == [[-4 * v for v in expected]]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_damaged_padding_is_found(name: str) -> None:
    """Kernels read padding: a single wrong bit there must not pass `strata verify`."""
    fmt = FORMATS[name]
    shape = PackedShape(fmt, 5, 100)
    data = pack(shape, random_codes(fmt, 5, 100))
    untouched = unpack(PackedTensor("w", shape, data))
    found = 0
    for position in np.random.default_rng(0).integers(0, data.size, 200):
        damaged = data.copy()
        damaged[position] ^= 0x11
        tensor = PackedTensor("w", shape, damaged)
        if np.array_equal(unpack(tensor), untouched, equal_nan=True):  # no logical value changed: padding
            found += 1
            with pytest.raises(StoreError, match="w .*" + name):
                check_padding(tensor)
    assert found > 20


def test_scales_that_are_not_finite_are_found() -> None:
    shape = PackedShape(FORMATS["w4g64"], 16, 64)
    codes = random_codes(shape.format, 16, 64)
    assert codes.scales is not None
    codes.scales[3, 0] = np.inf
    with pytest.raises(StoreError, match="1 scales are not finite"):
        check_padding(PackedTensor("w", shape, pack(shape, codes)))


def test_wrong_size_is_found() -> None:
    shape = PackedShape(FORMATS["w8"], 16, 64)
    with pytest.raises(StoreError, match="100 bytes, but its shape needs"):
        check_padding(PackedTensor("w", shape, np.zeros(100, np.uint8)))
