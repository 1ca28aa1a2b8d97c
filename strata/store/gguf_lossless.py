"""GGUF blocks whose quantization a WeightFormat can hold: codes and scales are moved, not rounded.

Q4_0, Q4_1, Q8_0 and MXFP4 keep every value bit for bit. Q4_K's two-level scales become their fp16
products (`exact=False`): at most half an fp16 ulp of each scale is lost, while the codes stay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.errors import WeightValueError
from strata.store.gguf_blocks import U8, fp16_column, k_scales, q4_k_codes, split_nibbles
from strata.store.source import QuantizedRows


def quantized_rows(kind: str, data: U8, rows: int) -> QuantizedRows | None:
    """Bytes of `rows` whole rows of GGUF type `kind`; None where the type must be re-quantized.

    Raises WeightValueError when a Q4_K scale does not fit fp16.
    """
    function = _FUNCTIONS.get(kind)
    return function(data, rows) if function else None


def _per_row(values: U8, rows: int) -> U8:
    return values.reshape(rows, -1)


def _q4_0(data: U8, rows: int) -> QuantizedRows:
    blocks = data.reshape(-1, 18)
    codes = _per_row(split_nibbles(blocks[:, 2:]), rows)
    return QuantizedRows("w4g32", codes, fp16_column(blocks, 0).reshape(rows, -1))


def _q4_1(data: U8, rows: int) -> QuantizedRows:
    blocks = data.reshape(-1, 20)
    scales, minimums = (fp16_column(blocks, at).reshape(rows, -1) for at in (0, 2))
    return QuantizedRows("w4g32m", _per_row(split_nibbles(blocks[:, 4:]), rows), scales, minimums)


def _q8_0(data: U8, rows: int) -> QuantizedRows:
    blocks = data.reshape(-1, 34)
    codes = _per_row(np.ascontiguousarray(blocks[:, 2:]), rows)
    return QuantizedRows("w8g32", codes, fp16_column(blocks, 0).reshape(rows, -1))


def _mxfp4(data: U8, rows: int) -> QuantizedRows:
    blocks = data.reshape(-1, 17)
    codes = _per_row(split_nibbles(blocks[:, 1:]), rows)
    return QuantizedRows("mxfp4", codes, _per_row(blocks[:, 0].copy(), rows))


def _q4_k(data: U8, rows: int) -> QuantizedRows:
    blocks = data.reshape(-1, 144)
    scales, minimums = k_scales(blocks[:, 4:16])
    d, dmin = (fp16_column(blocks, at).astype(np.float32) for at in (0, 2))
    with np.errstate(all="ignore"):
        scale, minimum = d * scales, -(dmin * minimums)
        scale16, minimum16 = scale.astype(np.float16), minimum.astype(np.float16)
    for wide, narrow in ((scale, scale16), (minimum, minimum16)):
        lost = np.isfinite(wide) & ~np.isfinite(narrow)
        if lost.any():
            raise WeightValueError(
                f"a Q4_K scale of {wide[lost][0]:.6g} exceeds fp16's 65504",
                remedy="choose a format that is quantized anew, e.g. --experts w4g64",
            )
    codes = _per_row(q4_k_codes(blocks[:, 16:]), rows)
    return QuantizedRows("w4g32m", codes, scale16.reshape(rows, -1), minimum16.reshape(rows, -1), exact=False)


_FUNCTIONS: dict[str, Callable[[U8, int], QuantizedRows]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
}
