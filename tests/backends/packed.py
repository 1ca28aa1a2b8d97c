"""Random packed matrices and experts for tests of backends: codes drawn at random, no quantizer runs."""

from __future__ import annotations

import numpy as np

from strata.backends.base import ExpertBank
from strata.store.formats import FORMATS, ExpertLayout, PackedShape, PackedTensor
from strata.store.pack import Codes, pack, scale_dtype


def random_codes(shape: PackedShape, rng: np.random.Generator) -> Codes:
    """Every code the format has; scales around 0.02, minimums around 0."""
    fmt, size = shape.format, (shape.rows, shape.cols)
    groups = -(-shape.cols // fmt.group) if fmt.group else 1
    values = {
        "int4": lambda: rng.integers(0, 16, size, dtype=np.uint8),
        "e2m1": lambda: rng.integers(0, 16, size, dtype=np.uint8),
        "int8": lambda: rng.integers(0, 256, size, dtype=np.uint8),
        "bf16": lambda: (rng.standard_normal(size, np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "f16": lambda: rng.standard_normal(size, np.float32).astype(np.float16).view(np.uint16),
    }[fmt.values]()
    scales = minimums = None
    if fmt.scale_bytes == 1:
        scales = rng.integers(118, 126, (shape.rows, groups), dtype=np.uint8)
    elif fmt.scale_bytes:
        scales = rng.uniform(0.01, 0.03, (shape.rows, groups)).astype(scale_dtype(fmt))
    if fmt.minimum:
        minimums = rng.uniform(-0.2, 0.1, (shape.rows, groups)).astype(np.float16)
    return Codes(values, scales, minimums)


def random_matrix(fmt: str, rows: int, cols: int, seed: int = 0) -> PackedTensor:
    """A packed matrix of random codes."""
    shape = PackedShape(FORMATS[fmt], rows, cols)
    return PackedTensor("random", shape, pack(shape, random_codes(shape, np.random.default_rng(seed))))


def interleaved_matrix(fmt: str, hidden: int, width: int, seed: int = 0) -> PackedTensor:
    """gate_up of a dense FFN whose padding rows are zero."""
    padded = -(-width // 8) * 8
    tensor = random_matrix(fmt, 2 * padded, hidden, seed)
    codes = random_codes(tensor.shape, np.random.default_rng(seed))
    rows = np.arange(2 * padded)
    _blank(codes, (rows // 16 * 8 + rows % 8) >= width, tensor.shape.format.zero_code)
    return PackedTensor("gate_up", tensor.shape, pack(tensor.shape, codes))


def _blank(codes: Codes, rows: np.ndarray, zero_code: int) -> None:
    codes.values[rows] = zero_code
    for part in (codes.scales, codes.minimums):
        if part is not None and part.dtype != np.uint8:
            part[rows] = 0


def random_bank(layout: ExpertLayout, experts: int, seed: int = 0) -> ExpertBank:
    """Experts of random codes (and random biases where the layout has them)."""
    records = [_record(layout, seed * 1000 + index) for index in range(experts)]
    return ExpertBank(0, experts, layout, records.__getitem__)


def _record(layout: ExpertLayout, seed: int) -> np.ndarray:
    record = np.zeros(layout.record_bytes, np.uint8)
    rng = np.random.default_rng(seed)
    for part in range(layout.slices):
        gate_up = interleaved_matrix(
            layout.gate_up_format.name, layout.hidden, layout.slice_width, seed + part
        )
        down = random_matrix(layout.down_format.name, layout.hidden, layout.slice_width, seed + 100 + part)
        for offset, tensor in ((layout.gate_up_offset(part), gate_up), (layout.down_offset(part), down)):
            record[offset : offset + tensor.shape.nbytes] = tensor.data
    if layout.biases:
        rows = layout.gate_up.rows
        values = rng.standard_normal((layout.slices, rows // 16, 2, 8)).astype(np.float32)
        index = np.arange(rows // 2).reshape(-1, 1, 8)
        values[
            np.broadcast_to(index >= layout.slice_width, values.shape[1:])[None].repeat(layout.slices, 0)
        ] = 0
        _put(record, layout.gate_up_bias_offset, values)
        _put(record, layout.down_bias_offset, rng.standard_normal(layout.hidden).astype(np.float32))
    return record


def _put(record: np.ndarray, offset: int, values: np.ndarray) -> None:
    data = values.reshape(-1).view(np.uint8)
    record[offset : offset + len(data)] = data
