"""Percentile clipping of w8: what is cut off, what is not touched, and where it is written down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes import SmallModel, small_model
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import UsageError
from strata.store.clipping import MARGIN, clipped, largest_kept
from strata.store.convert import convert
from strata.store.formats import FORMATS
from strata.store.manifest import read_manifest
from strata.store.options import ConvertOptions
from strata.store.pack import dequantize
from strata.store.planning import Planner
from strata.store.quantize import quantize

W8 = FORMATS["w8"]


def run(model: SmallModel, out: Path, options: ConvertOptions) -> None:
    convert(model.source, model.spec, model.targets, model.experts, out, options)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 300), st.floats(90, 99.99))
def test_what_is_not_cut_off_is_within_half_a_step(seed: int, rows: int, cols: int, percent: float) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    most = largest_kept(values, percent)
    found = dequantize(W8, clipped(percent, quantize)(values, W8, "m", 0))
    assert (most <= np.abs(values).max(axis=1)).all()
    kept = np.abs(values) <= most[:, None]
    steps = np.broadcast_to(most[:, None] / 127, values.shape)
    assert (np.abs(found - values)[kept] <= steps[kept] * 0.5001).all()
    np.testing.assert_allclose(
        np.abs(found)[~kept], np.broadcast_to(most[:, None], values.shape)[~kept], 1e-5
    )


def test_an_outlier_no_longer_makes_the_steps_of_its_row() -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(1, -1)
    values[0, 500] = 50.0
    found = dequantize(W8, clipped(99.5, quantize)(values, W8, "m", 0))
    assert found[0, 500] == pytest.approx(MARGIN * np.percentile(np.abs(values), 99.5), rel=1e-3)
    rest = np.delete(np.abs(found - values)[0], 500)
    assert rest.max() < np.abs(dequantize(W8, quantize(values, W8, "m")) - values).max() / 20


def test_rows_of_zeros_and_of_nearly_nothing_else_keep_what_they_have() -> None:
    values = np.zeros((2, 400), np.float32)
    values[1, 7] = -3.0
    found = dequantize(W8, clipped(99.0, quantize)(values, W8, "m", 0))
    np.testing.assert_allclose(found, values, rtol=1e-6)


@pytest.mark.parametrize("name", ["w4g64", "w8g32", "bf16"])
def test_other_formats_are_rounded_as_ever(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32)
    plain, other = (how(values, FORMATS[name], "m", 0) for how in (quantize, clipped(95.0, quantize)))
    np.testing.assert_array_equal(plain.values, other.values)


def test_the_manifest_names_it_and_only_w8_changes(tmp_path: Path) -> None:
    formats = {"experts": "w8", "shared": "w4g64", "head": "w8", "embed": "bf16"}
    for name, clip in (("plain", None), ("clipped", 92.0)):
        run(small_model(), tmp_path / name, ConvertOptions(**formats, clip=clip))
    one, other = (read_manifest(tmp_path / name) for name in ("plain", "clipped"))
    assert "clip" not in one.options and other.options["clip"] == 92.0
    files = {entry.file: entry.xxh3 for entry in one.files}
    changed = {entry.file for entry in other.files if files[entry.file] != entry.xxh3}
    assert any(name.startswith("experts/") for name in changed)


@pytest.mark.parametrize("percent", [100.0, 89.9, float("nan")])
def test_what_is_no_percentile_is_refused(percent: float) -> None:
    with pytest.raises(UsageError, match="use a percentile of 90 to less than 100"):
        ConvertOptions(clip=percent)


def test_it_is_refused_where_nothing_is_in_w8(tmp_path: Path) -> None:
    options = ConvertOptions(experts="w4g64", shared="w4g128", head="bf16", embed="bf16", clip=99.0)
    with pytest.raises(UsageError, match=r"clip is 99, and nothing is in w8: bf16, w4g128, w4g64"):
        run(small_model(), tmp_path / "s", options)
    assert list(tmp_path.iterdir()) == []


def test_it_is_refused_where_gptq_rounds_all_that_is_multiplied() -> None:
    formats = {"experts": "w8", "shared": "w4g128", "head": "bf16", "embed": "bf16"}
    options = ConvertOptions(**formats, methods={"experts": "gptq"}, clip=99.0)
    model = small_model()
    planner = Planner(model.source, model.spec, options)
    with pytest.raises(UsageError, match="in w8 but experts, which gptq finds its own scales for"):
        planner.plan(model.targets, model.experts)
