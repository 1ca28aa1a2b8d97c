"""Packed linear ops of the CPU backend on every instruction set this machine has, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import random_matrix

from strata.backends.base import Activations
from strata.backends.cpu import CpuBackend
from strata.backends.isa import NAMES, extension
from strata.store.formats import FORMATS, PackedTensor
from strata.store.pack import unpack

ISAS = [name for name in NAMES if extension().features()[name]]
FLOATS = ("bf16", "f16")
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 100, 150)
SHAPES = ((48, 256), (37, 100), (5, 1), (130, 700), (16, 64))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def error_bound(x: np.ndarray, weight: np.ndarray, span: int) -> np.ndarray:
    """What rounding activations to int8 may cost: half a step of absmax / 127 per element, times |w|."""
    cols = -(-x.shape[1] // span) * span
    spans = np.zeros((len(x), cols), np.float64)
    spans[:, : x.shape[1]] = np.abs(x)
    steps = spans.reshape(len(x), cols // span, span).max(axis=2).repeat(span, axis=1)[:, : x.shape[1]] / 127
    return 0.5 * steps @ np.abs(weight).T


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_f32_activations_are_exact_to_rounding(isa: str, fmt: str, shape: tuple[int, int]) -> None:
    backend = CpuBackend(threads=2, activations="f32", isa_name=isa)
    tensor = random_matrix(fmt, *shape)
    matrix = unpack(tensor).astype(np.float64)
    weight = backend.weight(tensor)
    for tokens in TOKENS:
        x = normal(tokens, shape[1])
        want = x.astype(np.float64) @ matrix.T
        size = np.abs(x).astype(np.float64) @ np.abs(matrix).T
        assert (np.abs(backend.linear(x, weight) - want) <= 1e-6 * size).all()


INT8 = [(name, "int8") for name in FORMATS if name not in FLOATS] + [("w8", "int8_per_token")]


@pytest.mark.parametrize(("fmt", "activations"), INT8)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_activations_stay_within_their_bound(
    isa: str, fmt: str, activations: Activations, shape: tuple[int, int]
) -> None:
    backend = CpuBackend(threads=2, isa_name=isa, activations=activations)
    tensor = random_matrix(fmt, *shape)
    matrix = unpack(tensor).astype(np.float64)
    weight, span = backend.weight(tensor), 32 if FORMATS[fmt].group == 32 else 64
    if activations == "int8_per_token":
        span = shape[1]
    for tokens in TOKENS:
        x = normal(tokens, shape[1])
        error = np.abs(backend.linear(x, weight) - x.astype(np.float64) @ matrix.T)
        size = np.abs(x).astype(np.float64) @ np.abs(matrix).T
        assert (error <= 1.001 * error_bound(x, matrix, span) + 1e-5 * size).all()
        if tokens >= 33 and shape[1] >= 100:  # errors add up like noise, far below the bound
            want = x.astype(np.float64) @ matrix.T
            assert np.linalg.norm(error) < 0.01 * np.linalg.norm(want)


def by_definition(x: np.ndarray, tensor: PackedTensor) -> np.ndarray:
    """W8A8: (sum of code products * scale of the token) * scale of the row, in f32."""
    shape = tensor.shape
    blocks = tensor.data.reshape(shape.blocks, shape.block_bytes)
    scales = blocks[:, shape.value_bytes : shape.value_bytes + 64].copy().view(np.float32).reshape(-1)
    matrix = unpack(tensor)
    of_rows = scales[: shape.rows]
    codes = np.rint(matrix / np.where(of_rows > 0, of_rows, 1)[:, None]).astype(np.int64)
    top = np.abs(x).max(axis=1, initial=0)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    sums = np.rint(x * inverse[:, None]).astype(np.int64) @ codes.T
    return (sums.astype(np.float32) * (top / np.float32(127))[:, None]) * of_rows


@pytest.mark.parametrize("shape", [*SHAPES, (48, 5000)])
def test_w8_is_exact_integer_sums_scaled_once(isa: str, shape: tuple[int, int]) -> None:
    tensor = random_matrix("w8", *shape)
    backend = CpuBackend(threads=2, isa_name=isa, activations="int8_per_token")
    weight = backend.weight(tensor)
    for tokens in TOKENS:
        x = normal(tokens, shape[1], seed=tokens)
        x[1::3] *= 100
        x[2::3, 0] = 1000  # an outlier takes all the precision
        assert np.array_equal(backend.linear(x, weight), by_definition(x, tensor))


def test_rows_too_long_for_32_bits_are_scaled_by_64_columns(isa: str) -> None:
    """127 * 127 * 133,200 is beyond a 32-bit sum: largest codes everywhere would wrap around."""
    tensor = random_matrix("w8", 16, 133_200)
    tensor.data.reshape(1, -1)[:, : tensor.shape.value_bytes] = 127
    x = np.ones((5, 133_200), np.float32)
    backend = CpuBackend(threads=1, isa_name=isa, activations="int8_per_token")
    want = x.astype(np.float64) @ unpack(tensor).T.astype(np.float64)
    np.testing.assert_allclose(backend.linear(x, backend.weight(tensor)), want, rtol=1e-4)


@pytest.mark.parametrize(
    ("fmt", "activations"),
    [(fmt, "int8") for fmt in ("w4g64", "w4g32m", "w8", "w8g32", "mxfp4")] + [("w8", "int8_per_token")],
)
def test_extreme_codes_do_not_overflow(isa: str, fmt: str, activations: Activations) -> None:
    """The 16-bit sums of AVX2 at their largest: all codes at an end, activations at +-absmax."""
    backend = CpuBackend(threads=1, isa_name=isa, activations=activations)
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        tensor = random_matrix(fmt, 16, 128)
        values = tensor.data.reshape(tensor.shape.blocks, -1)[:, : tensor.shape.value_bytes]
        values[:] = byte
        matrix = unpack(tensor).astype(np.float64)
        for rows in (1, 6, 14):
            for x in (np.ones((rows, 128), np.float32), -np.ones((rows, 128), np.float32)):
                np.testing.assert_allclose(backend.linear(x, backend.weight(tensor)), x @ matrix.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("fmt", "activations"),
    [(fmt, x) for fmt in FORMATS for x in ("int8", "f32")] + [("w8", "int8_per_token")],
)
def test_same_bits_alone_in_a_batch_with_other_threads_and_isa(fmt: str, activations: Activations) -> None:
    tensor, x = random_matrix(fmt, 83, 300), normal(45, 300)
    backends = [CpuBackend(threads=n, activations=activations, isa_name=i) for n in (1, 2) for i in ISAS]
    want = backends[0].linear(x, backends[0].weight(tensor))
    for backend in backends:
        weight = backend.weight(tensor)
        assert np.array_equal(backend.linear(x, weight), want)
        for row in (0, 20, 44):
            assert np.array_equal(backend.linear(x[row : row + 1], weight)[0], want[row])
        assert np.array_equal(backend.linear(x[7:10], weight), want[7:10])
        for rows in range(1, 18):  # each number has a kernel or a split of its own
            assert np.array_equal(backend.linear(x[:rows], weight), want[:rows])


def test_bias_is_added(isa: str) -> None:
    backend = CpuBackend(threads=2, isa_name=isa)
    weight, x, bias = backend.weight(random_matrix("w4g64", 37, 128)), normal(3, 128), normal(37)
    assert np.array_equal(backend.linear(x, weight, bias), backend.linear(x, weight) + bias)


@settings(deadline=None, max_examples=40)
@given(
    fmt=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    tokens=st.integers(0, 20),
    offset=st.integers(0, 15),
)
def test_any_shape_and_alignment(fmt: str, rows: int, cols: int, tokens: int, offset: int) -> None:
    tensor = random_matrix(fmt, rows, cols, seed=rows)
    shifted = np.empty(tokens * cols + offset, np.float32)[offset:].reshape(tokens, cols)
    shifted[:] = normal(tokens, cols, seed=cols)
    want = shifted.astype(np.float64) @ unpack(tensor).astype(np.float64).T
    for name in ISAS:
        backend = CpuBackend(threads=2, activations="f32", isa_name=name)
        got = backend.linear(shifted, backend.weight(tensor))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "head_rows"), [(4, 16), (3, 7), (5, 40)])
def test_head_linear(isa: str, heads: int, head_rows: int) -> None:
    backend = CpuBackend(threads=2, activations="f32", isa_name=isa)
    tensor, x = random_matrix("bf16", heads * head_rows, 48), normal(6, heads * 48)
    matrices = unpack(tensor).reshape(heads, head_rows, 48).astype(np.float64)
    want = np.einsum("thc,hrc->thr", x.reshape(6, heads, 48), matrices).reshape(6, -1)
    np.testing.assert_allclose(
        backend.head_linear(x, backend.weight(tensor), heads), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_gathers_rows_exactly(isa: str, fmt: str) -> None:
    backend = CpuBackend(threads=2, isa_name=isa)
    tensor = random_matrix(fmt, 50, 130)
    ids = np.array([49, 0, 17, 17, 3], np.int32)
    got = backend.embedding(backend.weight(tensor), ids, 12.0)
    assert np.array_equal(got, unpack(tensor)[ids] * np.float32(12.0))


@pytest.mark.parametrize("fmt", ["w4g64", "w8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_activations_stay_visible(isa: str, fmt: str, bad: float) -> None:
    backend = CpuBackend(threads=1, isa_name=isa, activations="int8_per_token")
    x = normal(3, 128)
    x[1, 70] = bad
    y = backend.linear(x, backend.weight(random_matrix(fmt, 16, 128)))
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("fmt", ["w4g64", "w8"])
def test_zero_and_tiny_activations(isa: str, fmt: str) -> None:
    backend = CpuBackend(threads=1, isa_name=isa, activations="int8_per_token")
    x = np.zeros((3, 128), np.float32)
    x[1] = 1e-38
    y = backend.linear(x, backend.weight(random_matrix(fmt, 16, 128)))
    assert np.abs(y).max() <= 1e-30


def test_wrong_shapes_name_both_numbers() -> None:
    backend = CpuBackend(threads=1)
    weight = backend.weight(random_matrix("w4g64", 16, 128))
    with pytest.raises(ValueError, match=r"columns of x are 64.*128"):
        backend.linear(normal(2, 64), weight)
    with pytest.raises(ValueError, match=r"values of the bias are 3.*16"):
        backend.linear(normal(2, 128), weight, normal(3))
    with pytest.raises(ValueError, match=r"token id 16.*16"):
        backend.embedding(weight, np.array([16], np.int32), 1.0)
    with pytest.raises(ValueError, match=r"rows of the weight are 16.*15"):
        backend.head_linear(normal(2, 640), weight, 5)


def test_cut_bytes_are_refused() -> None:
    tensor = random_matrix("w4g64", 16, 128)
    with pytest.raises(ValueError, match=r"bytes of the packed matrix are"):
        extension().PackedMatrix(tensor.data[:-64], FORMATS["w4g64"].code, 16, 128)


def test_both_sides_know_the_same_formats() -> None:
    known = extension().FORMATS
    for fmt in FORMATS.values():
        assert known[fmt.code] == (fmt.name, fmt.group, fmt.scale_bytes, fmt.minimum)
    assert len(known) == len(FORMATS)
