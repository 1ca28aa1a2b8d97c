"""The wrappers of device.cuh: the emulated side and the PTX side against numpy."""

from __future__ import annotations

import numpy as np
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values
from runners import Argument, Call, read_only, unwritten


def call(entry: str, *arguments: Argument, shared: int = 512) -> Call:
    return Call("wrappers", entry, (1,), 32, shared, arguments)


def matrices(entry: str) -> Prepared:
    """16-bit floats: sums start at 1, 2, 3, 4 in each lane's four places."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, 16)).astype(np.float32), rng.standard_normal((8, 16)).astype(np.float32)
    if entry == "multiply_bf16":
        left, right = bf16_bits(a), bf16_bits(b)
        a, b = bf16_values(left), bf16_values(right)
    else:
        left, right = a.astype(np.float16), b.astype(np.float16)
        a, b = left.astype(np.float32), right.astype(np.float32)
    out = unwritten((16, 8))
    expected = a @ b.T + starts()
    return Prepared(
        call(entry, read_only(left), read_only(right), out), lambda: assert_close(out, expected, 1e-6)
    )


def starts() -> np.ndarray:
    rows, columns = np.arange(16)[:, None] // 8, np.arange(8)[None, :] % 2
    return 1.0 + 2 * rows + columns


def bytes_() -> Prepared:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (16, 8))
    out = unwritten((16, 8), np.int32)
    expected = a.astype(int) @ b.T.astype(int) + starts().astype(int)
    return Prepared(
        call("multiply_s8", read_only(a), read_only(b), out),
        lambda: np.testing.assert_array_equal(out, expected),
    )


def transposed() -> Prepared:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8) * 999
    out = unwritten((8, 8), np.uint16)
    return Prepared(
        call("transpose", read_only(matrix), out), lambda: np.testing.assert_array_equal(out, matrix.T)
    )


def conversions() -> Prepared:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(32) * 10.0 ** rng.integers(-7, 5, 32)).astype(np.float32)
    x[:6] = [0.0, -0.0, 1.00390625, 65519.0, 5.96e-8, 2.0**-15]  # ties, the edges of f16, subnormal numbers
    out = unwritten((8, 32), np.uint32)

    def half(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)

    h, b = half(x).astype(np.float32), bf16_values(bf16_bits(x))
    three, one = np.full(32, 3.0, np.float32), np.ones(32, np.float32)
    with np.errstate(all="ignore"):
        expected = [
            bf16_bits(x).astype(np.uint32),
            half(x).view(np.uint16).astype(np.uint32),
            pair(bf16_bits(x), bf16_bits(x + one)),
            pair(half(x).view(np.uint16), half(x + one).view(np.uint16)),
            b.view(np.uint32),
            h.view(np.uint32),
            pair(half(h - np.float32(0.5)).view(np.uint16), half(three - h).view(np.uint16)),
            pair(bf16_bits(b * np.float32(1.5) + b), bf16_bits(three * b - one)),
        ]
    return Prepared(
        call("convert", read_only(x), out), lambda: np.testing.assert_array_equal(out, np.stack(expected))
    )


def words() -> Prepared:
    x = np.random.default_rng(4).integers(0, 2**32, 32, dtype=np.uint32)
    out, lanes = unwritten((9, 32), np.uint32), np.arange(32)
    parts = x.view(np.uint8).reshape(32, 4)
    other = np.uint32(0x64656667).reshape(1).view(np.uint8)
    first = np.stack([parts[:, 0], np.full(32, 0x64), parts[:, 1], np.full(32, 0x64)], axis=1)
    second = np.stack([parts[:, 2], np.full(32, other[2]), parts[:, 3], np.full(32, other[3])], axis=1)
    factors = np.int32(0x01FF7F80).reshape(1).view(np.int8).astype(np.int64)
    expected = np.stack(
        [
            np.ascontiguousarray(first.astype(np.uint8)).view(np.uint32)[:, 0],
            np.ascontiguousarray(second.astype(np.uint8)).view(np.uint32)[:, 0],
            (parts.view(np.int8).astype(np.int64) @ factors + 5).astype(np.int32).view(np.uint32),
            np.bitwise_count(x).astype(np.uint32),
            np.full(32, (((x & 1).astype(np.uint64) << lanes.astype(np.uint64)).sum()), np.uint32),
            x[lanes // 2],
            x[np.where(lanes >= 3, lanes - 3, lanes)],
            x[np.where(lanes < 27, lanes + 5, lanes)],
            x[lanes ^ 9],
        ]
    )
    return Prepared(call("integers", read_only(x), out), lambda: np.testing.assert_array_equal(out, expected))


def functions() -> Prepared:
    x = np.random.default_rng(6).uniform(0.1, 9, 32).astype(np.float32)
    x[:3] = [0.5, 1.5, 2.5]
    out = unwritten((6, 32))
    ones = np.ones(32)
    expected = np.stack([np.exp2(x), 1 / x, 1 / np.sqrt(x), x.sum() * ones, x.max() * ones, np.rint(x)])

    def check() -> None:
        np.testing.assert_allclose(out, expected, rtol=1e-6)

    return Prepared(call("functions", read_only(x), out), check)


def copies() -> Prepared:
    data = np.arange(128, dtype=np.uint32).reshape(32, 4) + 1000
    out, total = unwritten((32, 4), np.uint32), np.array([5, 1010], np.uint32)
    copied = np.where(np.arange(32)[:, None] < 31, data, 0)[np.arange(32) ^ 1]
    expected = np.stack([copied[:, 0], data[:, 1], data[:, 0], data[:, 3]], axis=1)
    flat = data.ravel()[:32]

    def check() -> None:
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(total, [5 + flat.sum(), max(1010, flat.max())])

    return Prepared(call("copies", read_only(data), out, total), check)


CASES = [
    Case("multiply-bf16", "wrappers", lambda: matrices("multiply_bf16"), True),
    Case("multiply-f16", "wrappers", lambda: matrices("multiply_f16"), True),
    Case("multiply-s8", "wrappers", bytes_, True),
    Case("transpose", "wrappers", transposed, True),
    Case("conversions", "wrappers", conversions, True),
    Case("integers", "wrappers", words, True),
    Case("functions", "wrappers", functions, True),
    Case("copies", "wrappers", copies, True),
]
