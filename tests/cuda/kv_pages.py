"""KV pages as csrc/cpu/kv_cache.h lays them out, packed and unpacked by plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import bf16_bits, bf16_values

from strata.backends.base import KvSpec

PLACES = [0, 2, 1, 3]
"""Where element (or token) j of a word of int8 codes lies."""


@dataclass(frozen=True)
class Parts:
    """One layer of a page: codes `[heads, tokens, dim]`, scales `[heads, groups, tokens]`."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray


def spec_of(dtype: str, heads: int, dim: int, page_tokens: int, layers: int = 2) -> KvSpec:
    return KvSpec(layers, heads, dim, dim, page_tokens, dtype)  # type: ignore[arg-type]


def latent_spec(dtype: str, rank: int, rope: int, page_tokens: int, layers: int = 2) -> KvSpec:
    """Of MLA: one head, whose value is the first `rank` elements of its key."""
    return KvSpec(layers, 1, rank + rope, rank, page_tokens, dtype, value_in_key=True)  # type: ignore[arg-type]


def layer_bytes(spec: KvSpec, parts: Parts) -> np.ndarray:
    """The block of one layer; padding holds 0xff. Codes are int8, or bf16's bits as u16."""
    block = np.full(spec.layer_bytes, 0xFF, np.uint8)
    at = 0
    scales = (parts.key_scales, parts.value_scales)[: _scales(spec)]
    for array in (_keys(parts.keys), _values(parts.values), *scales):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        block[at : at + raw.nbytes] = raw
        at += -(-raw.nbytes // 64) * 64
    assert at == spec.layer_bytes
    return block


def _scales(spec: KvSpec) -> int:
    """How many arrays of scales there are."""
    return 0 if spec.storage != "int8" else 1 if spec.value_in_key else 2


def _stored(codes: np.ndarray) -> tuple[np.ndarray, int]:
    """Codes as stored and how many are in a word."""
    if codes.dtype == np.int8:
        return (codes.astype(np.int16) + 128).astype(np.uint8), 4
    return codes, 2


def _keys(codes: np.ndarray) -> np.ndarray:
    stored, n = _stored(codes)
    heads, tokens, dim = codes.shape
    words = stored.reshape(heads, tokens // 16, 16, dim // n, n).transpose(0, 1, 3, 2, 4)
    return _placed(words, n)


def _values(codes: np.ndarray) -> np.ndarray:
    stored, n = _stored(codes)
    heads, tokens, dim = codes.shape
    words = stored.reshape(heads, tokens // n, n, dim // 16, 16).transpose(0, 3, 1, 4, 2)
    return _placed(words, n)


def _placed(words: np.ndarray, n: int) -> np.ndarray:
    if n == 2:
        return words
    placed = np.empty_like(words)
    placed[..., PLACES] = words
    return placed


def parts_of(spec: KvSpec, block: np.ndarray) -> Parts:
    """Inverse of layer_bytes."""
    heads, tokens, key_dim = spec.kv_heads, spec.page_tokens, spec.key_dim
    n, dtype = (4, np.uint8) if spec.storage == "int8" else (2, np.uint16)
    found: list[np.ndarray] = []
    at, value_dim = 0, 0 if spec.value_in_key else spec.value_dim
    for dim, shape, axes in (
        (key_dim, (heads, tokens // 16, key_dim // n, 16, n), (0, 1, 3, 2, 4)),
        (value_dim, (heads, value_dim // 16, tokens // n, 16, n), (0, 2, 4, 1, 3)),
    ):
        size = heads * tokens * dim * (4 // n)
        words = block[at : at + size].view(dtype).reshape(shape)
        words = words[..., PLACES] if n == 4 else words
        codes = words.transpose(axes).reshape(heads, tokens, dim)
        found.append((codes.astype(np.int16) - 128).astype(np.int8) if n == 4 else codes)
        at += -(-size // 64) * 64
    scales = []
    for dim in (key_dim, value_dim)[: _scales(spec)]:
        size = heads * spec.scales(dim) * tokens * 4
        scales.append(block[at : at + size].view(np.float32).reshape(heads, -1, tokens))
        at += -(-size // 64) * 64
    none = np.ones((heads, 1, tokens), np.float32)
    scales += [none] * (2 - len(scales))
    return Parts(found[0], found[1], *scales)


def meaning(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """f64 `[heads, tokens, dim]`. group: elements that share a scale, 0: all."""
    numbers = codes if codes.dtype == np.int8 else bf16_values(codes)
    dim = codes.shape[2]
    spread = scales.transpose(0, 2, 1).repeat(group or dim, axis=2)[:, :, :dim]
    return numbers.astype(np.float64) * spread


def random_parts(spec: KvSpec, rng: np.random.Generator) -> Parts:
    tokens = (spec.kv_heads, spec.page_tokens)
    shapes = ((*tokens, spec.key_dim), (*tokens, 0 if spec.value_in_key else spec.value_dim))
    if spec.storage == "int8":
        groups = [spec.scales(spec.key_dim), spec.scales(spec.value_dim)]
        scaled = [(spec.kv_heads, n, spec.page_tokens) for n in groups]
        scales = [np.exp(rng.uniform(-5, -3, shape)).astype(np.float32) for shape in scaled]
        codes = [rng.integers(-127, 128, shape).astype(np.int8) for shape in shapes]
        return Parts(codes[0], codes[1], scales[0], scales[1])
    codes = [bf16_bits(rng.standard_normal(shape)) for shape in shapes]
    none = np.ones((spec.kv_heads, 1, spec.page_tokens), np.float32)
    return Parts(codes[0], codes[1], none, none)
