"""ggml's block types to f32, bit for bit as ggml (and the gguf package) computes them.

Each function takes blocks u8 `[n, bytes per block]` and returns f32 `[n, values per block]`. The order of
the f32 operations is part of the result; block layouts are those of ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import UnsupportedError
from strata.store.gguf_types import TYPES

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
# E2M1 values, doubled so that they are integers; the sign is bit 3 and -0 counts as 0, as in ggml.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# Blocks dequantized at once: temporaries stay near the size of the L2 cache.
_CHUNK_VALUES = 1 << 18


def dequantize(kind: str, data: U8) -> F32:
    """Bytes of whole blocks of type `kind`, u8 `[n]`, to a flat f32 array.

    NaN and Inf pass through. Raises UnsupportedError for types that nobody can dequantize.
    """
    ggml = TYPES[kind]
    if kind == "F32":
        return data.view("<f4")
    blocks = data.reshape(-1, ggml.nbytes)
    out = np.empty((len(blocks), ggml.values), np.float32)
    function = _FUNCTIONS.get(kind) or _from_gguf_package(kind)
    step = max(1, _CHUNK_VALUES // ggml.values)
    with np.errstate(all="ignore"):  # hostile scales overflow; the converter looks for NaN and Inf
        for start in range(0, len(blocks), step):
            out[start : start + step] = function(blocks[start : start + step])
    return out.reshape(-1)


def fp16_column(blocks: U8, at: int) -> NDArray[np.float16]:
    """The fp16 that every block holds at byte `at`, `[n, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def split_nibbles(packed: U8) -> U8:
    """u8 `[n, k]` to `[n, 2k]`: all low nibbles, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def k_scales(packed: U8) -> tuple[U8, U8]:
    """Q4_K's and Q5_K's 12 bytes `[n, 12]` to 6-bit scales and minimums, `[n, 8]` each."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)], axis=1)
    return scales, minimums


def q4_k_codes(packed: U8) -> U8:
    """u8 `[n, 128]` to `[n, 256]`: each run of 32 bytes holds 32 low and then 32 high nibbles."""
    return split_nibbles(packed.reshape(-1, 32)).reshape(len(packed), 256)


def half_of_e8m0(exponent: U8) -> F32:
    """2**(e - 128) as f32, subnormal for e < 2: the doubled E2M1 values are scaled by this."""
    e = exponent.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


def mxfp4_values(codes: U8, exponents: U8) -> F32:
    """codes `[.., groups, 32]`, exponents `[.., groups]` to f32 like codes: E2M1 * 2**(e - 127)."""
    values: F32 = E2M1_DOUBLED[codes] * half_of_e8m0(exponents)[..., None]
    return values


def widen_bf16(data: U8) -> F32:
    """Bytes of little-endian bfloat16 to f32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def _q4_0(blocks: U8) -> F32:
    q = split_nibbles(blocks[:, 2:]).astype(np.float32)
    q -= 8
    return np.multiply(q, fp16_column(blocks, 0).astype(np.float32), out=q)


def _q4_1(blocks: U8) -> F32:
    q = split_nibbles(blocks[:, 4:]).astype(np.float32)
    q *= fp16_column(blocks, 0).astype(np.float32)
    return np.add(q, fp16_column(blocks, 2).astype(np.float32), out=q)


def _fifth_bits(packed: U8) -> U8:
    """u8 `[n, 4]` to `[n, 32]` of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: U8) -> F32:
    q = (split_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.float32)
    q -= 16
    return np.multiply(q, fp16_column(blocks, 0).astype(np.float32), out=q)


def _q5_1(blocks: U8) -> F32:
    q = (split_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).astype(np.float32)
    q *= fp16_column(blocks, 0).astype(np.float32)
    return np.add(q, fp16_column(blocks, 2).astype(np.float32), out=q)


def _q8_0(blocks: U8) -> F32:
    q = blocks[:, 2:].view(np.int8).astype(np.float32)
    return np.multiply(q, fp16_column(blocks, 0).astype(np.float32), out=q)


def _scale_super_blocks(codes: U8, blocks: U8) -> F32:
    """Q4_K and Q5_K: (d * scale) * q - (dmin * minimum) over 8 groups of 32."""
    scales, minimums = k_scales(blocks[:, 4:16])
    d = fp16_column(blocks, 0).astype(np.float32) * scales
    m = fp16_column(blocks, 2).astype(np.float32) * minimums
    q = codes.reshape(-1, 8, 32).astype(np.float32)
    q *= d[:, :, None]
    q -= m[:, :, None]
    return q.reshape(-1, 256)


def _q4_k(blocks: U8) -> F32:
    return _scale_super_blocks(q4_k_codes(blocks[:, 16:]), blocks)


def _q5_k(blocks: U8) -> F32:
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    codes = q4_k_codes(blocks[:, 48:]) | (high.reshape(-1, 256) << np.uint8(4))
    return _scale_super_blocks(codes, blocks)


def _q6_k(blocks: U8) -> F32:
    low = split_nibbles(np.ascontiguousarray(blocks[:, :128]).reshape(-1, 64)).reshape(-1, 256)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)
    q = (low | (high << 4)).astype(np.float32)
    q -= 32
    d = fp16_column(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    q = q.reshape(-1, 16, 16)
    q *= d[:, :, None]
    return q.reshape(-1, 256)


def _mxfp4(blocks: U8) -> F32:
    return mxfp4_values(split_nibbles(blocks[:, 1:]), blocks[:, 0])


def _bf16(blocks: U8) -> F32:
    return widen_bf16(blocks.reshape(-1)).reshape(-1, 1)


_FUNCTIONS: dict[str, Callable[[U8], F32]] = {
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _from_gguf_package(kind: str) -> Callable[[U8], F32]:
    """The rarer types (Q2_K, IQ4_XS, ...): correct but slow, so the package is loaded only for them."""
    import gguf

    try:
        known: Any = gguf.GGMLQuantizationType[kind]
        gguf.quants.dequantize(np.zeros((1, TYPES[kind].nbytes), np.uint8), known)
    except (KeyError, NotImplementedError):
        raise UnsupportedError(
            f"tensors of type {kind} cannot be dequantized", remedy="use a Q4_K, Q6_K, Q8_0 or BF16 file"
        ) from None
    return lambda blocks: gguf.quants.dequantize(np.ascontiguousarray(blocks), known)
