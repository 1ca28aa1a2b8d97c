"""f32 rows -> codes of a WeightFormat (pack.py packs them).

Four-bit scales are searched per group for the least squared error: the sign that gives the longer end of
the range the code -8, a few scales above the smallest one that clips nothing, and for each the least-squares
scale of its codes. Nothing is ever clipped by more than half a step, so |error| <= scale / 2 holds
everywhere. Measured against scale = absmax / 7 on Gaussian weights: 0.71-0.72 of the squared error (a search
that may clip reaches 0.69-0.70 for groups of 32 and 64, at the price of large errors on the outliers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import WeightValueError
from strata.store.formats import WeightFormat
from strata.store.pack import E8M0_TOP, Codes

Floats = NDArray[np.float32]

_STRETCH = (1.0, 1.03, 1.07)  # candidate scales over the smallest; more of them gain less than 0.5 %
_CHUNK_VALUES = 1 << 16  # 256 KiB of f32: a group search makes three passes per candidate, inside L2
_F16_MAX = 65504.0
_F16_TINY = 2.0**-24
_F32_TINY = float(np.finfo(np.float32).tiny)
_E2M1_TOP = 6.0 * 2.0 ** (E8M0_TOP - 127)
_BF16_TOP = float(np.float32(2.0**127 * (2 - 2.0**-8)))  # from here on rounding gives infinity
_F16_TOP = 65519.0
_F32_TOP = float(np.finfo(np.float32).max) * (1 - 2.0**-20)  # 127 * (top / 127) must not round to infinity


def quantize(values: Floats, fmt: WeightFormat, name: str, first_row: int = 0) -> Codes:
    """Quantize finite f32 `[rows, cols]`; `name` and `first_row` serve errors only.

    Raises WeightValueError where a value is too large for the format's scales.
    """
    check_range(values, fmt, name, first_row)
    if fmt.values == "bf16":
        return Codes(to_bf16(values))
    if fmt.values == "f16":
        return Codes(values.astype(np.float16).view(np.uint16))
    if fmt.group == 0:
        return per_row_int8(values, np.abs(values).max(axis=1, initial=0.0))
    return _by_groups(values, fmt)


def check_finite(values: Floats, name: str, first_row: int, allow_nan: bool) -> int:
    """Refuse NaN and Inf; with `allow_nan` put 0 in their place (in `values`) and return how many.

    Raises WeightValueError naming the tensor, the first index and the count in these rows.
    """
    # Maximum and minimum pass NaN on; a reduction needs no temporary the size of the tensor.
    if values.size == 0 or (np.isfinite(values.max()) and np.isfinite(values.min())):
        return 0
    bad = ~np.isfinite(values)
    count = int(bad.sum())
    if not allow_nan:
        row, col = (int(i) for i in np.argwhere(bad)[0])
        raise WeightValueError(
            f"{name}: {values[row, col]} at [{first_row + row}, {col}]; {count} such values in these rows",
            remedy="get an undamaged checkpoint, or `strata convert --allow-nan` it (they become 0)",
        )
    values[bad] = 0.0
    return count


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bf16, ties to even; values must be finite."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)


def largest_value(fmt: WeightFormat) -> float:
    """The largest |value| the format can take without an infinite scale or value."""
    if fmt.values == "bf16":
        return _BF16_TOP
    if fmt.values == "f16":
        return _F16_TOP
    if fmt.values == "e2m1":
        return _E2M1_TOP
    if fmt.scale_bytes == 4:
        return _F32_TOP
    if fmt.minimum:
        return _F16_MAX
    return _F16_MAX * (127.0 if fmt.values == "int8" else 7.5)


def check_range(values: Floats, fmt: WeightFormat, name: str, first_row: int) -> None:
    """Raises WeightValueError where a value is too large for the format's scales."""
    if values.size == 0:
        return
    limit = largest_value(fmt)
    if max(float(values.max()), -float(values.min())) <= limit:
        return
    row, col = (int(i) for i in np.argwhere(np.abs(values) > limit)[0])
    raise WeightValueError(
        f"{name}: {values[row, col]:g} at [{first_row + row}, {col}]; {fmt.name} holds {limit:g} at most",
        remedy="store this part as w8 (it has f32 scales) or bf16",
    )


def per_row_int8(values: Floats, top: Floats) -> Codes:
    """w8: one f32 scale per row, whose 127th step is `top` `[rows]`; what is larger is cut off.

    Scales below the smallest normal number are raised to it.
    """
    scales = np.where(top > 0, np.maximum(top / np.float32(127), np.float32(_F32_TINY)), 0).astype(np.float32)
    codes = np.rint(values * _inverse(scales)[:, None])
    np.clip(codes, -127, 127, out=codes)
    return Codes(codes.astype(np.int8).view(np.uint8), scales[:, None])


def _inverse(scales: Floats) -> Floats:
    """1 / scale, 0 where scale is 0: those groups are all zero."""
    return np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)


Search = Callable[[Floats], tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any] | None]]


def _by_groups(values: Floats, fmt: WeightFormat) -> Codes:
    """Run the format's search over cache-sized runs of groups; a short last group is completed by zeros."""
    rows, cols = values.shape
    groups = -(-cols // fmt.group)
    search = _SEARCHES[(fmt.values, fmt.minimum)]
    codes = np.empty((rows, groups * fmt.group), np.uint8)
    scales = np.empty((rows, groups), np.uint8 if fmt.scale_bytes == 1 else np.float16)
    minimums = np.empty((rows, groups), np.float16) if fmt.minimum else None
    step = max(1, _CHUNK_VALUES // (groups * fmt.group))
    for start in range(0, rows, step):
        part = _completed(values[start : start + step], groups * fmt.group, repeat_last=fmt.minimum)
        found, scale, minimum = search(part.reshape(-1, fmt.group))
        codes[start : start + step] = found.reshape(part.shape)
        scales[start : start + step] = scale.reshape(len(part), groups)
        if minimums is not None and minimum is not None:
            minimums[start : start + step] = minimum.reshape(len(part), groups)
    return Codes(codes[:, :cols], scales, minimums)


def _completed(values: Floats, cols: int, repeat_last: bool) -> Floats:
    """Rows filled up to `cols`: with zeros, or (formats with a minimum) with the row's last value,
    which widens no group's range; the caller cuts these columns off again."""
    if values.shape[1] == cols:
        return np.ascontiguousarray(values)
    full = np.zeros((values.shape[0], cols), np.float32)
    full[:, : values.shape[1]] = values
    if repeat_last:
        full[:, values.shape[1] :] = values[:, -1:]
    return full


def _at_least(scales: Floats, least: Floats) -> NDArray[np.float16]:
    """fp16 scales nearest to `scales` but not below `least` (both >= 0): rounding down would clip."""
    half = np.clip(scales, least, np.float32(_F16_MAX)).astype(np.float16)
    low = half.astype(np.float32) < least
    half[low] = np.nextafter(half[low], np.float16(np.inf))
    return half


def _symmetric_int4(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float16], None]:
    """Groups `[n, group]` -> codes 0..15 (value = scale * (code - 8)) and fp16 scales of either sign."""
    top, bottom = x.max(axis=1), -x.min(axis=1)
    np.maximum(top, 0, out=top)
    np.maximum(bottom, 0, out=bottom)
    positive = np.maximum(top / np.float32(7.5), bottom / np.float32(8.5))
    negative = np.maximum(bottom / np.float32(7.5), top / np.float32(8.5))
    sign = np.where(positive <= negative, np.float32(1), np.float32(-1))
    least = np.minimum(positive, negative)
    np.maximum(least, np.float32(_F16_TINY), out=least, where=least > 0)
    half = _at_least(_least_squares(x * _inverse(least * sign)[:, None]) * least, least)
    scales = half * sign.astype(np.float16)
    codes = np.rint(x * _inverse(scales.astype(np.float32))[:, None])
    codes += 8.0
    np.clip(codes, 0, 15, out=codes)
    return codes.astype(np.uint8), scales, None


def _least_squares(y: Floats) -> Floats:
    """Best stretch (>= 1) per group of `y`, groups already divided by their least scale.

    For codes q the squared error at stretch s is |y|^2 - 2 s y.q + s^2 q.q, least at s = y.q / q.q.
    """
    best = np.ones(len(y), np.float32)
    least_error = np.zeros(len(y), np.float32)
    q = np.empty_like(y)
    for stretch in _STRETCH:
        np.multiply(y, np.float32(1 / stretch), out=q)
        np.rint(q, out=q)
        np.minimum(q, 7, out=q)
        yq, qq = np.einsum("gk,gk->g", y, q), np.einsum("gk,gk->g", q, q)
        scale = np.maximum(np.divide(yq, qq, out=np.ones_like(yq), where=qq > 0), np.float32(1))
        error = scale * (scale * qq - 2 * yq)
        better = error < least_error
        best[better], least_error[better] = scale[better], error[better]
    return best


def _minimum_int4(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Groups `[n, group]` -> codes 0..15 (value = scale * code + minimum), fp16 scales and minimums.

    Two candidates: the range cut into 15 and into 15.6 steps (half a step may lie outside at both ends),
    each with its minimum rounded to fp16 first and the scale then chosen to cover what is left.
    """
    low, high = x.min(axis=1), x.max(axis=1)
    codes, scales, minimums = _cover(x, low, high, 0.0)
    other = _cover(x, low, high, 0.3)
    better = _squared_error(x, *other) < _squared_error(x, codes, scales, minimums)
    codes[better], scales[better], minimums[better] = (part[better] for part in other)
    return codes.astype(np.uint8), scales, minimums


def _squared_error(x: Floats, codes: Floats, scales: NDArray[Any], minimums: NDArray[Any]) -> Floats:
    """Of each group, with the scales and minimums as they are stored."""
    error = codes * scales.astype(np.float32)[:, None]
    error += minimums.astype(np.float32)[:, None]
    error -= x
    squares: Floats = np.einsum("gk,gk->g", error, error)
    return squares


def _cover(
    x: Floats, low: Floats, high: Floats, outside: float
) -> tuple[Floats, NDArray[np.float16], NDArray[np.float16]]:
    """Codes, scales and minimums whose 16 values reach within half a step of low and high.

    About `outside` steps (0 to 0.5) of the range lie beyond either end.
    """
    step = (high - low) / np.float32(15 + 2 * outside)
    minimums = _not_above(low + np.float32(outside) * step)
    above = high - minimums.astype(np.float32)
    below = minimums.astype(np.float32) - low
    scales = _at_least(step, np.maximum(above / np.float32(15 + outside), below * 2))
    codes = np.rint((x - minimums.astype(np.float32)[:, None]) * _inverse(scales.astype(np.float32))[:, None])
    return np.clip(codes, 0, 15, out=codes), scales, minimums


def _not_above(values: Floats) -> NDArray[np.float16]:
    """The largest fp16 that is not above each value."""
    half = values.astype(np.float16)
    high = half.astype(np.float32) > values
    half[high] = np.nextafter(half[high], np.float16(-np.inf))
    return half


def _int8_groups(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float16], None]:
    """w8g32: scale = absmax / 127 rounded up to fp16 (eight bits leave nothing to search for)."""
    least = np.abs(x).max(axis=1) / np.float32(127)
    scales = _at_least(least, least)
    codes = np.rint(x * _inverse(scales.astype(np.float32))[:, None])
    np.clip(codes, -127, 127, out=codes)
    return codes.astype(np.int8).view(np.uint8), scales, None


_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_STEPS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e2m1_groups(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8], None]:
    """mxfp4: per group the better of the two smallest exponents that clip at most half a step (7 -> 6)."""
    top = np.abs(x).max(axis=1)
    fraction, power = np.frexp(top / np.float32(7))
    least = np.clip(power - (fraction == 0.5), -127, E8M0_TOP - 127)
    codes, error = _e2m1_codes(x, least)
    wider = np.minimum(least + 1, E8M0_TOP - 127)
    other_codes, other_error = _e2m1_codes(x, wider)
    better = 4 * other_error < error  # errors are in squared units of each one's own scale
    codes[better] = other_codes[better]
    exponent = np.where(better, wider, least)
    return codes, np.where(top > 0, exponent + 127, 0).astype(np.uint8), None


def _e2m1_codes(x: Floats, exponent: NDArray[Any]) -> tuple[NDArray[np.uint8], Floats]:
    """Nearest E2M1 codes at scale 2**exponent, and each group's squared error in units of scale ** 2."""
    scaled = x * np.ldexp(np.float32(1), -exponent)[:, None]
    size = np.abs(scaled)
    codes = np.zeros(x.shape, np.uint8)
    for edge in _E2M1_EDGES:
        codes += size > edge
    size -= _E2M1_STEPS[codes]
    codes |= np.signbit(scaled).astype(np.uint8) << np.uint8(3)
    return codes, np.einsum("gk,gk->g", size, size)


_SEARCHES: dict[tuple[str, bool], Search] = {
    ("int4", False): _symmetric_int4,
    ("int4", True): _minimum_int4,
    ("int8", False): _int8_groups,
    ("e2m1", False): _e2m1_groups,
}
