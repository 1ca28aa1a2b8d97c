"""rms_norm against the reference backend in f64."""

from __future__ import annotations

import numpy as np
import torch
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.reference import ReferenceBackend

EPS = 1e-6


def prepare(rows: int, columns: int, outputs: str, branch: bool, zero_row: bool = False) -> Prepared:
    rng = np.random.default_rng(rows * columns)
    residual = rng.standard_normal((rows, columns)).astype(np.float32) * 3
    if zero_row:
        residual[0] = 0.0
    added = read_only(rng.standard_normal((rows, columns)).astype(np.float32)) if branch else None
    weight = read_only(rng.uniform(0.5, 1.5, columns).astype(np.float32))
    scale = 0.25
    wanted = residual.astype(np.float64) + (scale * added if added is not None else 0.0)
    reference = ReferenceBackend(torch.float64)
    expected = reference.rms_norm(torch.from_numpy(wanted), reference.vector(weight), EPS).numpy()
    plain = unwritten((rows, columns)) if "p" in outputs else None
    rounded = unwritten((rows, columns), np.uint16) if "r" in outputs else None
    codes = unwritten((rows, columns), np.int8) if "c" in outputs else None
    scales = unwritten((rows,)) if "c" in outputs else None
    stream = residual if branch else read_only(residual)
    call = call_of(
        launch_shapes.rms_norm(rows, columns),
        (stream, added, weight, plain, rounded, codes, scales, columns, scale, EPS),
    )

    def check() -> None:
        assert_close(stream, wanted, 1e-6)
        if plain is not None:
            assert_close(plain, expected, 2e-6)
        if rounded is not None:
            assert_close(bf16_values(rounded), expected, 4e-3)
            if plain is not None:
                np.testing.assert_array_equal(rounded, bf16_bits(plain))
        if codes is not None and scales is not None:
            assert_close(scales, np.abs(expected).max(axis=1) / 127, 2e-6)
            steps = np.where(scales > 0, scales, 1.0)[:, None]
            assert np.abs(codes - expected / steps).max() <= 0.5 + 1e-3

    return Prepared(call, check)


def case(name: str, ptx: bool, *arguments: object) -> Case:
    return Case(name, "norm", lambda: prepare(*arguments), ptx)  # type: ignore[arg-type]


CASES = [
    case("all-outputs", True, 2, 1024, "prc", True),
    case("tail", True, 3, 1028, "prc", True),
    case("narrow", False, 5, 36, "p", True),
    case("no-branch", True, 2, 512, "r", False),
    case("wide", False, 1, 5120, "c", True),
    case("zero-row", False, 2, 128, "prc", False, True),
]
