"""Random packed matrices of the store, and what they mean."""

from __future__ import annotations

import numpy as np

from strata.store.formats import FORMATS, VALUE_BITS, ExpertLayout, PackedShape, PackedTensor
from strata.store.pack import Codes, pack, unpack


def random_matrix(fmt: str, rows: int, columns: int, seed: int = 0) -> tuple[PackedTensor, np.ndarray]:
    """The packed bytes and the f64 values, with scales of very different sizes."""
    rng = np.random.default_rng(seed)
    shape = PackedShape(FORMATS[fmt], rows, columns)
    tensor = PackedTensor(fmt, shape, pack(shape, _random_codes(shape, rng)))
    return tensor, unpack(tensor).astype(np.float64)


def random_record(layout: ExpertLayout, seed: int) -> np.ndarray:
    """The bytes of one expert, its biases f32."""
    rng = np.random.default_rng(seed)
    record = np.zeros(layout.record_bytes, np.uint8)
    for part in range(layout.slices):
        for shape, offset in (
            (layout.gate_up, layout.gate_up_offset(part)),
            (layout.down, layout.down_offset(part)),
        ):
            record[offset : offset + shape.nbytes] = pack(shape, _random_codes(shape, rng))
    if layout.biases:
        for offset, count in (
            (layout.gate_up_bias_offset, layout.slices * layout.gate_up.rows),
            (layout.down_bias_offset, layout.hidden),
        ):
            values = rng.standard_normal(count).astype(np.float32)
            record[offset : offset + values.nbytes] = values.view(np.uint8)
    return record


def _random_codes(shape: PackedShape, rng: np.random.Generator) -> Codes:
    fmt, size = shape.format, (shape.rows, shape.cols)
    if VALUE_BITS[fmt.values] == 16:
        numbers = rng.standard_normal(size).astype(np.float32)
        is_half = fmt.values == "f16"
        return Codes(
            numbers.astype(np.float16).view(np.uint16)
            if is_half
            else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        )
    values = rng.integers(0, 16 if VALUE_BITS[fmt.values] == 4 else 256, size).astype(np.uint8)
    groups = -(-shape.cols // fmt.group) if fmt.group else 1
    sizes = np.exp(rng.uniform(-4, 0, (shape.rows, groups)))
    if fmt.scale_bytes == 1:
        return Codes(values, rng.integers(120, 130, (shape.rows, groups)).astype(np.uint8))
    scales = sizes.astype(np.float16 if fmt.scale_bytes == 2 else np.float32)
    minimums = (
        (rng.standard_normal((shape.rows, groups)) * sizes * 8).astype(np.float16) if fmt.minimum else None
    )
    return Codes(values, scales, minimums)
