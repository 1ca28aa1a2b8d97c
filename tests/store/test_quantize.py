"""Quantization: the quality of four-bit scales, and the values that ruined other projects' models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import WeightValueError
from strata.store.formats import FORMATS, PackedShape, PackedTensor, WeightFormat
from strata.store.pack import Codes, check_padding, dequantize, pack, unpack
from strata.store.quantize import check_finite, largest_value, quantize, to_bf16

FOUR_BIT = ("w4g32", "w4g64", "w4g128")
BF16_MAX = np.float32(3.3895314e38)


def round_trip(values: np.ndarray, fmt: WeightFormat) -> np.ndarray:
    codes = quantize(values, fmt, "w")
    for scales in (codes.scales, codes.minimums):
        assert scales is None or np.isfinite(scales).all()
    shape = PackedShape(fmt, *values.shape)
    tensor = PackedTensor("w", shape, pack(shape, codes))
    check_padding(tensor)
    found = unpack(tensor)
    assert np.isfinite(found).all()
    return found


def step_at(values: np.ndarray, fmt: WeightFormat, codes: Codes) -> np.ndarray:
    """The distance of neighbouring representable values around each value."""
    if fmt.values == "bf16":
        return np.maximum(np.abs(values) * 2.0**-7, 2.0**-133)
    if fmt.values == "f16":
        return np.maximum(np.abs(values) * 2.0**-10, 2.0**-24)
    assert codes.scales is not None
    if fmt.values == "e2m1":
        scales = np.ldexp(1.0, codes.scales.astype(np.int32) - 127)
        scaled = np.abs(values) / _spread(scales, fmt, values.shape[1])
        return _spread(scales, fmt, values.shape[1]) * np.select([scaled < 2, scaled < 4], [0.5, 1.0], 2.0)
    return np.abs(_spread(codes.scales.astype(np.float64), fmt, values.shape[1]))


def _spread(scales: np.ndarray, fmt: WeightFormat, cols: int) -> np.ndarray:
    return np.repeat(scales, fmt.group or cols, axis=1)[:, :cols]


def assert_half_a_step(values: np.ndarray, fmt: WeightFormat) -> None:
    codes = quantize(values, fmt, "w")
    error = np.abs(dequantize(fmt, codes).astype(np.float64) - values)
    rounding = np.abs(values).max(initial=0) * 2.0**-22  # of f32 arithmetic on the way
    assert (error <= step_at(values, fmt, codes) * 0.5000001 + rounding).all()


magnitudes = st.sampled_from([1e-30, 1e-9, 1e-6, 1e-3, 1.0, 100.0, 3e4])


@given(
    st.sampled_from(sorted(FORMATS)), st.integers(1, 20), st.integers(1, 300), magnitudes, st.integers(0, 999)
)
@settings(max_examples=150, deadline=None)
def test_error_is_at_most_half_a_step(name: str, rows: int, cols: int, magnitude: float, seed: int) -> None:
    """case-22, case-23: any size, any magnitude, outliers and offsets included."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(2, (rows, cols)) * rng.choice([1.0, 0.01], (rows, 1)) + rng.choice([0, 0, 3])
    values = np.clip(values * magnitude, -6e4, 6e4).astype(np.float32)
    round_trip(values, FORMATS[name])
    assert_half_a_step(values, FORMATS[name])


@pytest.mark.parametrize("name", FOUR_BIT)
def test_searched_scales_beat_absmax(name: str) -> None:
    """Mean squared error on Gaussian weights against scale = absmax / 7: a ratio of 0.71 to 0.73."""
    fmt = FORMATS[name]
    values = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    groups = values.reshape(-1, fmt.group)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    plain = np.square(groups - scales * np.clip(np.rint(groups / scales), -8, 7)).mean()
    ratio = np.square(values - round_trip(values, fmt)).mean() / plain
    assert 0.69 < ratio < 0.74


@pytest.mark.parametrize("name", ["w4g32m", "w4g64m", "w4g128m"])
def test_minimum_helps_where_values_are_one_sided(name: str) -> None:
    values = np.random.default_rng(0).random((16, 1024)).astype(np.float32) + np.float32(0.5)
    symmetric = FORMATS[name.removesuffix("m")]
    ours = np.square(values - round_trip(values, FORMATS[name])).mean()
    assert ours < 0.2 * np.square(values - round_trip(values, symmetric)).mean()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zeros_stay_zeros(name: str) -> None:
    """case-22: all zero, one zero group, -0.0, and a lone 1e-11 that no fp16 scale can show."""
    fmt = FORMATS[name]
    assert not round_trip(np.zeros((64, 64), np.float32), fmt).any()
    assert not round_trip(np.full((64, 64), -0.0, np.float32), fmt).any()
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    values[:, :128] = 0
    assert not round_trip(values, fmt)[:, :128].any()
    tiny = np.zeros((64, 64), np.float32)
    tiny[0, 0] = 1e-11
    found = round_trip(tiny, fmt)
    assert not found.ravel()[1:].any()
    assert abs(found[0, 0] - 1e-11) <= 1e-11


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_constant_rows_and_fp16_subnormals(name: str) -> None:
    """case-22: constants are nearly exact in every format; subnormals keep finite scales."""
    fmt = FORMATS[name]
    constant = np.repeat(np.array([[5.0001], [-1e-3], [0.25]], np.float32), 100, axis=1)
    assert np.abs(round_trip(constant, fmt) / constant - 1).max() < (0.3 if name == "mxfp4" else 0.005)
    subnormal = np.full((3, 100), 3e-6, np.float32)
    assert_half_a_step(subnormal, fmt)
    round_trip(subnormal, fmt)


def test_bf16_max_is_stored_or_refused() -> None:
    """case-22: a scale that fp16 cannot hold is refused with the value and a remedy, never stored as Inf."""
    values = np.zeros((2, 64), np.float32)
    values[1, 7] = BF16_MAX
    for name in ("bf16", "w8"):
        assert np.isclose(round_trip(values, FORMATS[name])[1, 7], BF16_MAX, rtol=1e-6)
    for name in ("f16", "w8g32", "mxfp4", *FOUR_BIT, "w4g64m"):
        with pytest.raises(WeightValueError, match=r"experts\.3: 3\.38953e\+38 at \[101, 7\]") as caught:
            quantize(values, FORMATS[name], "experts.3", first_row=100)
        assert "w8" in caught.value.remedy


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_largest_value_of_a_format_is_finite(name: str) -> None:
    values = np.array([[largest_value(FORMATS[name]), 0.0, -largest_value(FORMATS[name])]], np.float32)
    found = round_trip(np.nextafter(values, np.float32(0)), FORMATS[name])
    assert np.allclose(found[0, ::2], values[0, ::2], rtol=0.08)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_are_refused_with_their_place(bad: float) -> None:
    """case-22: tensor, first index and count."""
    values = np.zeros((4, 64), np.float32)
    values[2, 5] = values[3, 0] = bad
    with pytest.raises(WeightValueError, match=r"layers\.0\.up: -?(nan|inf) at \[12, 5\]; 2 such values"):
        check_finite(values, "layers.0.up", 10, allow_nan=False)
    assert check_finite(values, "layers.0.up", 10, allow_nan=True) == 2
    assert not values.any()


@pytest.mark.parametrize("cols", [100, 640, 768, 1408, 2880])
@pytest.mark.parametrize("name", ["w4g32", "w4g64", "w4g128", "w4g128m", "mxfp4"])
def test_columns_that_are_no_multiple_of_the_group(name: str, cols: int) -> None:
    """case-23: the padded last group is as exact as if it stood alone."""
    fmt = FORMATS[name]
    values = np.random.default_rng(0).standard_normal((17, cols)).astype(np.float32)
    found = round_trip(values, fmt)
    start = cols // fmt.group * fmt.group
    if start < cols:
        assert np.array_equal(found[:, start:], round_trip(values[:, start:], fmt))
    assert_half_a_step(values, fmt)


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000], np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000]


@given(st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_representable_values_come_back_unchanged(seed: int) -> None:
    """Numbers that lie on a format's grid are found again exactly."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-8, 8, (8, 128)).astype(np.float32)
    steps[:, ::32] = -8
    steps[:, 1::32] = 7
    for name in FOUR_BIT:
        assert np.array_equal(round_trip(steps * np.float32(0.125), FORMATS[name]), steps * np.float32(0.125))
    e2m1 = rng.choice(np.array([0, 0.5, -1, 1.5, 2, -3, 4, 6], np.float32), (8, 128))
    e2m1[:, ::32] = 6
    assert np.array_equal(round_trip(e2m1, FORMATS["mxfp4"]), e2m1)
