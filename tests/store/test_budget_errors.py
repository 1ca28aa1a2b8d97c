"""What formats cost by a method's own rounding, which is what a budget has to weigh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fakes import SmallModel
from test_methods import SPEC
from tiny_model import mla_spec
from whole_model import make_stats, whole_model

from strata.errors import UsageError
from strata.store.budget import Choice, choose_formats
from strata.store.budget_errors import FormatErrors, Unit
from strata.store.calibration import CalibrationStats
from strata.store.calibration_inputs import row_inputs
from strata.store.convert import convert
from strata.store.inputs import Inputs
from strata.store.methods import parse_methods
from strata.store.options import ConvertOptions
from strata.store.pack import unpack
from strata.store.reader import Store

FORMATS = ("w4g64", "w4g64m", "w8")


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return whole_model(SPEC)


@pytest.fixture(scope="module")
def stats(model: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> CalibrationStats:
    return make_stats(tmp_path_factory.mktemp("stats") / "stats", model)


def options(method: str, **more: str) -> ConvertOptions:
    return ConvertOptions(methods={} if method == "plain" else parse_methods(method), **more)


def errors(model: SmallModel, stats: CalibrationStats, method: str) -> FormatErrors:
    return FormatErrors(model.source, model.spec, model.targets, model.experts, options(method), stats)


def chosen(model: SmallModel, stats: CalibrationStats, budget: int, method: str) -> Choice:
    what = model.source, model.spec, model.targets, model.experts
    return choose_formats(*what, options(method, shared="w4g64", embed="w8"), stats, budget)


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_what_a_method_takes_off_is_seen(model: SmallModel, stats: CalibrationStats, method: str) -> None:
    """Inputs of these statistics are strongly correlated: plain rounding's errors say nothing of gptq's."""
    ours, plain = errors(model, stats, method), errors(model, stats, "plain")
    units = [Unit("shared", 0, "attn.out"), *([Unit("experts", 1)] if method == "gptq" else [])]
    for unit in units:
        with_method, without = ours.of(unit, FORMATS), plain.of(unit, FORMATS)
        assert list(with_method) == list(FORMATS)
        assert all(with_method[name] < 0.7 * without[name] for name in FORMATS), (unit, with_method, without)
        assert with_method["w8"] < 0.1 * with_method["w4g64"]


def test_an_error_is_that_of_the_store(model: SmallModel, stats: CalibrationStats, tmp_path: Path) -> None:
    """All rows of queries and keys by what they read, and of values by what attention makes of it."""
    asked, name = options("gptq", shared="w4g64"), "layers.0.attn.qkv.weight"
    convert(model.source, model.spec, model.targets, model.experts, tmp_path / "s", asked, stats=stats)
    with Store.open(tmp_path / "s") as store:
        off = unpack(store.tensor(name)) - model.source.arrays[name]
    wanted = 0.0
    for part in row_inputs(model.spec, name, len(off)):
        inputs, rows = Inputs.of(stats.linear(part.name, part.member)), slice(part.start, part.stop)
        wanted += inputs.cost(off[rows]) / inputs.cost(model.source.arrays[name][rows])
    found = errors(model, stats, "gptq").of(Unit("shared", 0, "attn.qkv"), ["w4g64"])["w4g64"]
    found *= 2 * model.spec.layers
    assert found == pytest.approx(wanted, rel=0.3)


@pytest.mark.parametrize("method", ["plain", "awq"])
def test_clipped_rows_are_weighed_as_they_will_be(
    model: SmallModel, stats: CalibrationStats, method: str
) -> None:
    """Only those of w8, and worse in this model, whose weights have no outliers."""
    how = dataclasses.replace(options(method), clip=91.0)
    clipped = FormatErrors(model.source, model.spec, model.targets, model.experts, how, stats)
    for unit in (Unit("shared", 0, "attn.out"), Unit("experts", 1)):
        cut, whole = clipped.of(unit, FORMATS), errors(model, stats, method).of(unit, FORMATS)
        assert cut["w8"] > 2 * whole["w8"] and cut["w4g64"] == whole["w4g64"], (unit, cut, whole)


def test_a_clipped_error_is_that_of_the_store(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    asked, name = ConvertOptions(shared="w8", clip=91.0), "layers.0.attn.out.weight"
    convert(model.source, model.spec, model.targets, model.experts, tmp_path / "s", asked)
    with Store.open(tmp_path / "s") as store:
        off = unpack(store.tensor(name)) - model.source.arrays[name]
    squares = stats.linear(name).mean_square
    wanted = float((off * off @ squares).sum() / (model.source.arrays[name] ** 2 @ squares).sum())
    clipped = FormatErrors(model.source, model.spec, model.targets, model.experts, asked, stats)
    found = clipped.of(Unit("shared", 0, "attn.out"), ["w8"])["w8"] * 2 * model.spec.layers
    assert found == pytest.approx(wanted, rel=0.01)


def test_a_budget_goes_with_clipping(model: SmallModel, stats: CalibrationStats) -> None:
    """Sizes are asked for before there is anything in w8."""
    how = dataclasses.replace(options("plain", shared="w4g64", head="bf16", embed="bf16"), clip=99.0)
    what = model.source, model.spec, model.targets, model.experts
    assert choose_formats(*what, how, stats, 1 << 30).options.clip == 99.0


def test_a_budget_with_nothing_to_choose_is_refused(model: SmallModel, stats: CalibrationStats) -> None:
    every = dict.fromkeys(("experts", "shared", "head", "embed"), "w8")
    what = model.source, model.spec, model.targets, model.experts
    with pytest.raises(UsageError, match="the budget of 1 GiB has no format to choose"):
        choose_formats(*what, options("plain", **every), stats, 1 << 30)


def test_the_choice_is_the_methods_own(model: SmallModel, stats: CalibrationStats) -> None:
    """What it says of a part is what was measured with the method."""
    unit = Unit("experts", 1)
    offer = chosen(model, stats, 250_000, "gptq").chosen[unit]
    assert errors(model, stats, "gptq").of(unit, [offer.format]) == {offer.format: offer.error}
    assert errors(model, stats, "plain").of(unit, [offer.format]) != {offer.format: offer.error}


def test_heads_of_mla_are_tried_one_by_one(tmp_path: Path) -> None:
    model = whole_model(mla_spec())
    stats = make_stats(tmp_path / "stats", model)
    ours, plain = (
        errors(model, stats, m).of(Unit("shared", 1, "attn.k_b"), ["w4g32"])["w4g32"]
        for m in ("gptq", "plain")
    )
    assert 0 < ours < 0.7 * plain


def test_gptq_without_moments_is_refused_before_anything_is_tried(model: SmallModel, tmp_path: Path) -> None:
    stats = make_stats(tmp_path / "stats", model, moments=False)
    with pytest.raises(UsageError, match="no second moments, which gptq needs"):
        chosen(model, stats, 1 << 30, "gptq")


def test_an_error_of_nothing_is_none(stats: CalibrationStats) -> None:
    model = whole_model(SPEC)
    for name, values in model.source.arrays.items():
        if "down" in name or "qkv" in name or "gate" in name or "up" in name or "out" in name:
            values[:] = np.zeros_like(values)
    found = errors(model, stats, "gptq")
    assert found.of(Unit("experts", 1), ["w4g64"]) == {"w4g64": 0.0}
