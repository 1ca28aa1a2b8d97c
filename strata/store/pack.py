"""Packing matrices into row blocks and back, for every WeightFormat (layout: formats.py).

All formats share one trick: 32-bit words. A word holds 8, 4 or 2 neighbouring columns of one row (4, 8
or 16 bit values), and packing is a transposition of words from `[16 rows, words]` to `[words, 16 rows]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import StoreError
from strata.store.formats import ROW_BLOCK, VALUE_BITS, PackedShape, PackedTensor, WeightFormat

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What a 4-bit mxfp4 code means before scaling (OCP Microscaling Formats v1.0, table 5)."""

E8M0_TOP = 252
"""The largest E8M0 byte whose values are all finite in f32: 6 * 2**125."""

_SCALE_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.float16, 4: np.float32}
_CHUNK_VALUES = 1 << 20  # temporaries of unpacking stay at a few MB, in cache


@dataclass(frozen=True)
class Codes:
    """Quantized rows before packing.

    values: u8 `[rows, cols]` for 4 and 8 bit (int8 viewed as u8), u16 (bit patterns) for bf16 and f16.
    scales, minimums: `[rows, groups]` in the format's own type (u8 E8M0, fp16, f32), None where it has none.
    """

    values: NDArray[Any]
    scales: NDArray[Any] | None = None
    minimums: NDArray[Any] | None = None


def scale_dtype(fmt: WeightFormat) -> Any:
    """The numpy type of the format's scales and minimums."""
    return _SCALE_DTYPES[fmt.scale_bytes]


def pack(shape: PackedShape, codes: Codes) -> NDArray[np.uint8]:
    """The packed bytes u8 `[shape.nbytes]` of codes of `[shape.rows, shape.cols]`."""
    out = np.zeros(shape.nbytes, np.uint8)
    pack_into(shape, codes, out)
    return out


def pack_into(shape: PackedShape, codes: Codes, out: NDArray[np.uint8]) -> None:
    """Pack into `out`, u8 `[shape.nbytes]`, 4-byte aligned and zeroed by the caller."""
    fmt, blocks = shape.format, out.reshape(shape.blocks, shape.block_bytes)
    values = _pad(codes.values, shape.padded_rows, shape.padded_cols, fmt.zero_code)
    words = _to_words(fmt, values).reshape(shape.blocks, ROW_BLOCK, -1)
    target = blocks[:, : shape.value_bytes].view(np.uint32).reshape(shape.blocks, -1, ROW_BLOCK)
    np.copyto(target, words.transpose(0, 2, 1))
    offset = shape.value_bytes
    for part in (codes.scales, codes.minimums):
        if part is not None:
            _put_scales(shape, part, blocks[:, offset : offset + shape.scale_block_bytes])
            offset += shape.scale_block_bytes


def _put_scales(shape: PackedShape, scales: NDArray[Any], target: NDArray[np.uint8]) -> None:
    """Write scales `[rows, groups]` group after group, 16 rows each, into `target` `[blocks, bytes]`."""
    full = _pad(scales, shape.padded_rows, shape.groups, 0).astype(scale_dtype(shape.format), copy=False)
    parts = full.reshape(shape.blocks, ROW_BLOCK, shape.groups).transpose(0, 2, 1)
    target[...] = np.ascontiguousarray(parts).view(np.uint8).reshape(shape.blocks, -1)


def _pad(array: NDArray[Any], rows: int, cols: int, fill: int) -> NDArray[Any]:
    """`array` with rows of zeros and columns of `fill` appended; values of padding rows are `fill` too."""
    if array.shape == (rows, cols):
        return np.ascontiguousarray(array)
    full = np.full((rows, cols), fill, array.dtype)
    full[: array.shape[0], : array.shape[1]] = array
    return full


def _to_words(fmt: WeightFormat, values: NDArray[Any]) -> NDArray[np.uint32]:
    """Values `[rows, cols]` -> words `[rows, cols * bits / 32]`."""
    if VALUE_BITS[fmt.values] != 4:
        return values.view(np.uint32)
    eight = values.view(np.uint64)  # byte j: column 8c + j; the upper four move into the high nibbles
    return (eight | (eight >> np.uint64(28))).astype(np.uint32)


def _from_words(fmt: WeightFormat, words: NDArray[np.uint32]) -> NDArray[Any]:
    """Inverse of `_to_words`: u8 or u16 `[rows, cols]`."""
    if VALUE_BITS[fmt.values] != 4:
        return words.view(np.uint16 if VALUE_BITS[fmt.values] == 16 else np.uint8)
    low, high = words & np.uint32(0x0F0F0F0F), (words >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
    return (low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))).view(np.uint8)


def unpack_codes(shape: PackedShape, data: NDArray[np.uint8], start: int, stop: int) -> Codes:
    """Codes of row blocks [start, stop), padding included: values `[16 * (stop - start), padded_cols]`."""
    blocks = data.reshape(shape.blocks, shape.block_bytes)[start:stop]
    packed = np.ascontiguousarray(blocks[:, : shape.value_bytes]).view(np.uint32)
    words = np.ascontiguousarray(packed.reshape(len(blocks), -1, ROW_BLOCK).transpose(0, 2, 1))
    values = _from_words(shape.format, words.reshape(len(blocks) * ROW_BLOCK, -1))
    return Codes(values, *_unpack_scales(shape, blocks))


def _unpack_scales(
    shape: PackedShape, blocks: NDArray[np.uint8]
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Scales and minimums `[16 * blocks, groups]` of blocks u8 `[blocks, block_bytes]`."""
    parts: list[NDArray[Any] | None] = [None, None]
    for i in range((2 if shape.format.minimum else 1) if shape.groups else 0):
        offset = shape.value_bytes + i * shape.scale_block_bytes
        raw = np.ascontiguousarray(blocks[:, offset : offset + shape.scale_block_bytes])
        scales = raw.view(scale_dtype(shape.format)).reshape(len(blocks), shape.groups, ROW_BLOCK)
        parts[i] = np.ascontiguousarray(scales.transpose(0, 2, 1)).reshape(-1, shape.groups)
    return parts[0], parts[1]


def dequantize(fmt: WeightFormat, codes: Codes) -> NDArray[np.float32]:
    """What codes mean, f32 `[rows, cols]`: the one definition every backend is measured against.

    Scales and minimums are widened to f32 first; one multiplication, then one addition, each rounded.
    """
    if fmt.values == "bf16":
        return (codes.values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt.values == "f16":
        return codes.values.view(np.float16).astype(np.float32)
    assert codes.scales is not None
    numbers = _numbers(fmt, codes.values)
    if fmt.group == 0:
        numbers *= codes.scales
        return numbers
    _per_group(fmt.group, numbers, _widen(fmt, codes.scales), np.multiply)
    if codes.minimums is not None:
        _per_group(fmt.group, numbers, codes.minimums.astype(np.float32), np.add)
    return numbers


def _numbers(fmt: WeightFormat, values: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers that scales multiply, f32, a fresh array."""
    if fmt.values == "e2m1":
        return E2M1[values]
    numbers = values.view(np.int8).astype(np.float32)
    if fmt.values == "int4" and not fmt.minimum:
        numbers -= 8.0
    return numbers


def _widen(fmt: WeightFormat, scales: NDArray[Any]) -> NDArray[np.float32]:
    if fmt.scale_bytes == 1:
        return np.ldexp(np.float32(1.0), scales.astype(np.int32) - 127)
    return scales.astype(np.float32)


def _per_group(group: int, numbers: NDArray[np.float32], factors: NDArray[np.float32], op: np.ufunc) -> None:
    """numbers[:, g] = op(numbers[:, g], factors[:, g]) in place; the last group may be short."""
    rows, cols = numbers.shape
    whole = cols // group
    body = numbers[:, : whole * group].reshape(rows, whole, group)
    op(body, factors[:, :whole, None], out=body)
    if whole * group < cols:
        tail = numbers[:, whole * group :]
        op(tail, factors[:, whole : whole + 1], out=tail)


def unpack(tensor: PackedTensor) -> NDArray[np.float32]:
    """The whole matrix, f32 `[rows, cols]`."""
    return unpack_rows(tensor, 0, tensor.shape.rows)


def unpack_rows(tensor: PackedTensor, start: int, stop: int) -> NDArray[np.float32]:
    """Rows [start, stop) as f32 `[stop - start, cols]`; only their row blocks are read."""
    shape = tensor.shape
    out = np.empty((stop - start, shape.cols), np.float32)
    for first, last in _block_ranges(shape, start // ROW_BLOCK, (stop + ROW_BLOCK - 1) // ROW_BLOCK):
        values = dequantize(shape.format, unpack_codes(shape, tensor.data, first, last))
        lo, hi = max(start, first * ROW_BLOCK), min(stop, last * ROW_BLOCK)
        out[lo - start : hi - start] = values[lo - first * ROW_BLOCK : hi - first * ROW_BLOCK, : shape.cols]
    return out


def _block_ranges(shape: PackedShape, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Split row blocks [first, last) so that each part has about _CHUNK_VALUES values."""
    step = max(1, _CHUNK_VALUES // (ROW_BLOCK * shape.padded_cols))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def check_padding(tensor: PackedTensor) -> None:
    """Raise StoreError where padding or scales are not what formats.py promises (kernels rely on it)."""
    shape = tensor.shape
    if tensor.data.nbytes != shape.nbytes:
        raise StoreError(f"{tensor.name}: {tensor.data.nbytes} bytes, but its shape needs {shape.nbytes}")
    used = shape.value_bytes + shape.scale_block_bytes * (2 if shape.format.minimum else 1)
    blocks = tensor.data.reshape(shape.blocks, shape.block_bytes)
    if blocks[:, used:].any():
        raise _padding_error(tensor, "the bytes after a block's scales are not zero")
    is_padded = (shape.rows, shape.cols) != (shape.padded_rows, shape.padded_cols)
    for first, last in _block_ranges(shape, 0, shape.blocks):
        rows = shape.rows - first * ROW_BLOCK
        if is_padded:
            _check_values(tensor, unpack_codes(shape, tensor.data, first, last).values, rows)
        for scales in _unpack_scales(shape, blocks[first:last]):
            if scales is not None:
                _check_scales(tensor, scales, rows)


def _check_values(tensor: PackedTensor, values: NDArray[Any], rows: int) -> None:
    """Padding columns and padding rows (from `rows` on) of a run of row blocks."""
    zero = tensor.shape.format.zero_code
    if (values[:, tensor.shape.cols :] != zero).any() or (values[rows:] != zero).any():
        raise _padding_error(tensor, "a padding value is not the zero code")


def _check_scales(tensor: PackedTensor, scales: NDArray[Any], rows: int) -> None:
    fmt = tensor.shape.format
    groups = -(-tensor.shape.cols // fmt.group) if fmt.group else tensor.shape.groups
    if scales[:, groups:].any() or scales[rows:].any():
        raise _padding_error(tensor, "the scale of a group of padding is not zero")
    bad = (scales > E8M0_TOP) if fmt.scale_bytes == 1 else ~np.isfinite(scales)
    if bad.any():
        raise _padding_error(tensor, f"{int(bad.sum())} scales are not finite")


def _padding_error(tensor: PackedTensor, what: str) -> StoreError:
    return StoreError(f"{tensor.name} ({tensor.shape.format.name}): {what}", remedy="convert the model again")
