"""Bias, q/k norm, clip, RoPE and the writing of KV pages, against the reference backend in f64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from cases import Case, Prepared, assert_close, call_of
from kv_pages import latent_spec, meaning, parts_of, spec_of
from runners import Pointers, read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.reference import ReferenceBackend
from strata.backends.rope import rope_tables
from strata.plan.spec import AttentionSpec, RopeSpec

EPS, LAYER = 1e-5, 1


@dataclass(frozen=True)
class Setup:
    """positions: of the rows, of sequences with two pages each; page_tokens is 32."""

    dtype: str
    heads: int
    kv_heads: int
    dim: int
    positions: tuple[int, ...]
    rows_of: tuple[int, ...]
    rotary: int = 0
    bias: bool = True
    norm: bool = True
    interleaved: bool = False
    clip: float | None = None
    successive: bool = False  # without tables of pages and positions
    latent: int = 0  # elements of a key that only keys have: values are not stored

    @property
    def spec(self) -> AttentionSpec:
        rope = RopeSpec("default", 10000.0, self.rotary or self.dim, self.interleaved)
        return AttentionSpec(self.heads, self.kv_heads, self.dim, 1.0, rope, clip_qkv=self.clip)


def fused(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.dim + setup.heads)
    rows, spec, all_heads = len(setup.positions), setup.spec, setup.heads + 2 * setup.kv_heads
    qkv = rng.standard_normal((rows, all_heads, setup.dim)).astype(np.float32)
    bias = rng.standard_normal((all_heads, setup.dim)).astype(np.float32) if setup.bias else None
    norms = [rng.uniform(0.5, 1.5, setup.dim).astype(np.float32) if setup.norm else None for _ in range(2)]
    cosines, sines = rope_tables(spec.rope, np.array(setup.positions, np.int32))
    q = unwritten((rows, setup.heads, setup.dim))
    pages = _Pages(setup)
    shape = launch_shapes.heads_of_rows("prepare_qkv", all_heads, rows, setup.dim)
    arrays = (qkv, bias, *norms, cosines, sines)
    numbers = (setup.heads, setup.kv_heads, setup.dim, spec.rope.rotary_dim, int(setup.interleaved))
    tail = (*pages.numbers, EPS, setup.clip or 0.0)
    inputs = tuple(None if array is None else read_only(array) for array in arrays)
    call = call_of(shape, (*inputs, *pages.arguments, q, *numbers, *tail), pages.reached)
    added = qkv.astype(np.float64) + (bias if bias is not None else 0.0)
    parts = np.split(added, [setup.heads, setup.heads + setup.kv_heads], axis=1)
    expected_q = _prepared(setup, parts[0], norms[0])
    expected_k = _prepared(setup, parts[1], norms[1])
    expected_v = parts[2] if setup.clip is None else parts[2].clip(-setup.clip, setup.clip)

    def check() -> None:
        assert_close(q, expected_q, 2e-6)
        pages.check(expected_k, expected_v)

    return Prepared(call, check)


def in_place(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.dim)
    rows, spec = len(setup.positions), setup.spec
    x = rng.standard_normal((rows, setup.heads, setup.dim)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, setup.dim).astype(np.float32) if setup.norm else None
    expected = _prepared(setup, x.astype(np.float64), norm)
    cosines, sines = rope_tables(spec.rope, np.array(setup.positions, np.int32))
    shape = launch_shapes.heads_of_rows("prepare_heads", setup.heads, rows, setup.dim)
    inputs = (None if norm is None else read_only(norm), read_only(cosines), read_only(sines))
    numbers = (setup.heads, setup.dim, spec.rope.rotary_dim, int(setup.interleaved), EPS, setup.clip or 0.0)
    return Prepared(call_of(shape, (x, *inputs, *numbers)), lambda: assert_close(x, expected, 2e-6))


def append(setup: Setup) -> Prepared:
    rng = np.random.default_rng(setup.dim)
    rows = len(setup.positions)
    k, v = (rng.standard_normal((rows, setup.kv_heads, setup.dim)).astype(np.float32) for _ in range(2))
    k[0, 0] = 0.0  # a head of zeros has scale 0
    pages = _Pages(setup)
    heads = (1 if setup.latent else 2) * setup.kv_heads
    shape = launch_shapes.heads_of_rows("append_kv", heads, rows, setup.dim)
    numbers = (setup.kv_heads, setup.dim, *pages.numbers)
    inputs = (read_only(k), None if setup.latent else read_only(v))
    call = call_of(shape, (*inputs, *pages.arguments, *numbers), pages.reached)
    return Prepared(call, lambda: pages.check(k.astype(np.float64), v.astype(np.float64)))


class _Pages:
    """Two pages per sequence, every byte 0xff."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.spec = spec_of(setup.dtype, setup.kv_heads, setup.dim, 32)
        if setup.latent:
            self.spec = latent_spec(setup.dtype, setup.dim - setup.latent, setup.latent, 32)
        count = 2 * (max(setup.rows_of) + 1)
        self.reached = tuple(np.full(self.spec.page_bytes, 0xFF, np.uint8) for _ in range(count))
        first = read_only(np.array([2 * s for s in setup.rows_of], np.int32))
        positions = read_only(np.array(setup.positions, np.int32))
        tables = (None, None) if setup.successive else (first, positions)
        self.arguments = (Pointers(tuple(range(count))), *tables)
        start = setup.positions[0] if setup.successive else 0
        group = (self.spec.group or setup.dim) if self.spec.storage == "int8" else 0
        self.numbers = (32, LAYER * self.spec.layer_bytes, group, start)

    def check(self, keys: np.ndarray, values: np.ndarray) -> None:
        """What was written means keys and values `[rows, kv_heads, dim]`, and nothing else was written."""
        touched = np.zeros((len(self.reached), self.spec.kv_heads, 32), bool)
        for row, (position, sequence) in enumerate(
            zip(self.setup.positions, self.setup.rows_of, strict=True)
        ):
            page = 2 * sequence + position // 32
            parts = parts_of(self.spec, self.reached[page][LAYER * self.spec.layer_bytes :])
            self._check_head(parts.keys, parts.key_scales, position % 32, keys[row])
            if not self.setup.latent:
                self._check_head(parts.values, parts.value_scales, position % 32, values[row])
            touched[page, :, position % 32] = True
        for page, used in zip(self.reached, touched, strict=True):
            assert (page[: LAYER * self.spec.layer_bytes] == 0xFF).all()
            parts = parts_of(self.spec, page[LAYER * self.spec.layer_bytes :])
            untouched = 127 if self.spec.storage == "int8" else 0xFFFF
            assert (parts.keys[~used] == untouched).all() and (parts.values[~used] == untouched).all()

    def _check_head(self, codes: np.ndarray, scales: np.ndarray, token: int, expected: np.ndarray) -> None:
        found = meaning(codes, scales, self.spec.group)[:, token]
        if self.spec.dtype == "bf16":
            np.testing.assert_allclose(found, expected, rtol=4e-3, atol=1e-6)
            return
        group = self.spec.group or expected.shape[1]
        starts = np.arange(0, expected.shape[1], group)
        largest = np.maximum.reduceat(np.abs(expected), starts, axis=1)
        assert_close(scales[:, :, token], largest / 127, 1e-5)
        steps = scales[:, :, token].repeat(group, axis=1)[:, : expected.shape[1]]
        assert (np.abs(found - expected) <= 0.501 * steps).all()


def _prepared(setup: Setup, x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    reference, rows = ReferenceBackend(torch.float64), x.shape[0]
    weight = None if norm is None else reference.vector(norm)
    flat = torch.from_numpy(x.reshape(rows, -1).copy())
    positions = np.array(setup.positions, np.int32)
    return (
        reference.prepare_heads(flat, x.shape[1], positions, setup.spec, weight, EPS).numpy().reshape(x.shape)
    )


INT8 = Setup("int8", 4, 2, 128, (5, 35, 6, 63), (0, 0, 1, 1))
BF16 = Setup("bf16", 3, 1, 64, (31, 32, 0), (0, 0, 1), rotary=48, bias=False)
PLAIN = Setup("int8", 2, 1, 64, (17, 18, 19, 16), (0, 0, 0, 0), norm=False, interleaved=True, clip=0.75)
SUCCESSIVE = Setup("int8", 2, 1, 64, (30, 31, 32), (0, 0, 0), successive=True)
LATENT = Setup("int8", 1, 1, 576, (30, 31, 32, 0), (0, 0, 0, 1), latent=64)
CASES = [
    Case("successive", "prepare_heads", lambda: fused(SUCCESSIVE)),
    Case("append-successive", "prepare_heads", lambda: append(SUCCESSIVE)),
    Case("int8", "prepare_heads", lambda: fused(INT8), True),
    Case("bf16", "prepare_heads", lambda: fused(BF16), True),
    Case("clipped", "prepare_heads", lambda: fused(PLAIN), True),
    Case("in-place", "prepare_heads", lambda: in_place(INT8), True),
    Case("in-place-partial", "prepare_heads", lambda: in_place(BF16)),
    Case("in-place-clipped", "prepare_heads", lambda: in_place(PLAIN)),
    Case("append-int8", "prepare_heads", lambda: append(PLAIN), True),
    Case("append-latent-int8", "prepare_heads", lambda: append(LATENT), True),
    Case("append-latent-bf16", "prepare_heads", lambda: append(replace(LATENT, dtype="bf16"))),
    Case("groups", "prepare_heads", lambda: fused(replace(INT8, dtype="int8g32")), True),
    Case("append-groups", "prepare_heads", lambda: append(replace(INT8, dtype="int8g64", dim=96))),
    Case("append-bf16", "prepare_heads", lambda: append(BF16), True),
]
