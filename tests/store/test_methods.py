"""Conversions with statistics: what they gain, what they refuse, and that they can be stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SmallModel
from test_convert import digest, expert_matrices
from tiny_model import mla_spec, moe_spec
from whole_model import make_stats, whole_model

from strata.core import ExpertId
from strata.errors import StoreError, StrataError, UsageError, WeightValueError
from strata.plan.spec import ModelSpec
from strata.store.calibration import CalibrationStats, stats_layout
from strata.store.calibration_inputs import row_inputs, values_input
from strata.store.convert import ConvertReport, convert
from strata.store.formats import FORMATS
from strata.store.inputs import Inputs
from strata.store.manifest import read_manifest
from strata.store.methods import METHODS, parse_methods
from strata.store.options import ConvertOptions
from strata.store.pack import dequantize, unpack
from strata.store.quantize import quantize
from strata.store.reader import Store
from strata.store.receipts import all_formats, formats_in_words, lossy_formats
from strata.store.stats_check import with_stats
from strata.store.verify import verify_store

SPEC = replace(moe_spec(2), hidden=96)


def all_parts(method: str, **more: Any) -> ConvertOptions:
    return ConvertOptions(methods=parse_methods(method), **more)


def run(
    model: SmallModel, out: Path, options: ConvertOptions, stats: CalibrationStats | None
) -> ConvertReport:
    return convert(model.source, model.spec, model.targets, model.experts, out, options, stats=stats)


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return whole_model(SPEC)


@pytest.fixture(scope="module")
def stats(model: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> CalibrationStats:
    return make_stats(tmp_path_factory.mktemp("stats") / "stats", model)


def qkv_error(model: SmallModel, store: Path, inputs: Inputs) -> float:
    """Of layer 0's projections as a share of their output, factors that were folded away undone."""
    with Store.open(store) as opened:
        found = unpack(opened.tensor("layers.0.attn.qkv.weight"))
        norm = opened.plain("layers.0.attn_norm.weight")
    wanted = model.source.arrays["layers.0.attn.qkv.weight"]
    found = found * (norm / model.source.arrays["layers.0.attn_norm.weight"])
    rows = slice(0, 96)  # q and k: v's rows are rescaled, too
    return inputs.cost(found[rows] - wanted[rows]) / inputs.cost(wanted[rows])


def test_methods_are_better_than_plain_where_it_counts(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    """Measured on these random inputs: awq and gptq leave a third and less of plain's error."""
    inputs = Inputs.of(stats.linear("layers.0.attn.qkv.weight"))
    errors = {}
    for method in METHODS:
        given = stats if method != "plain" else None
        run(model, tmp_path / method, all_parts(method, shared="w4g64", experts="w4g64"), given)
        errors[method] = qkv_error(model, tmp_path / method, inputs)
        assert verify_store(tmp_path / method).problems == ()
    assert errors["gptq"] < 0.5 * errors["plain"]
    assert errors["awq"] < 0.9 * errors["plain"]
    assert errors["awq+gptq"] < 0.5 * errors["plain"]
    assert errors["smooth"] < errors["plain"]


def test_an_expert_is_rounded_for_its_own_tokens(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    """Expert 2 by what it saw, expert 1, which saw too little, by its layer's statistics."""
    run(model, tmp_path / "s", all_parts("gptq", experts="w4g32"), stats)
    fmt = FORMATS["w4g32"]
    with Store.open(tmp_path / "s") as store:
        for index in (1, 2):
            found = expert_matrices(store, ExpertId(1, index))
            for part, matrix in zip(("gate", "up", "down"), found, strict=True):
                wanted = model.source.arrays[f"1.{index}.{part}"]
                kind = "down" if part == "down" else "gate_up"
                inputs = Inputs.of(stats.expert(ExpertId(1, index), kind))
                plain = dequantize(fmt, quantize(wanted, fmt, ""))
                assert inputs.cost(matrix - wanted) < 0.7 * inputs.cost(plain - wanted)
    assert stats.expert(ExpertId(1, 1), "down").shared
    assert not stats.expert(ExpertId(1, 2), "down").shared


def test_values_are_rounded_for_what_attention_makes_of_their_inputs(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    """Their statistics are other random inputs here."""
    run(model, tmp_path / "s", all_parts("shared=gptq", shared="w4g32"), stats)
    name, fmt = "layers.1.attn.qkv.weight", FORMATS["w4g32"]
    with Store.open(tmp_path / "s") as store:
        found, wanted = unpack(store.tensor(name)), model.source.arrays[name]
    plain = dequantize(fmt, quantize(wanted, fmt, ""))
    parts = row_inputs(model.spec, name, len(wanted))
    assert [part.name for part in parts] == [name, values_input(1)]
    assert parts[-1].stop == len(wanted)
    for part in parts:
        inputs, rows = Inputs.of(stats.linear(part.name, part.member)), slice(part.start, part.stop)
        assert inputs.cost((found - wanted)[rows]) < 0.7 * inputs.cost((plain - wanted)[rows])


def test_parts_without_a_method_are_what_they_were(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    run(model, tmp_path / "plain", ConvertOptions(), None)
    run(model, tmp_path / "mixed", all_parts("experts=gptq,shared=plain"), stats)
    before, after = digest(tmp_path / "plain"), digest(tmp_path / "mixed")
    assert before["shared.safetensors"] == after["shared.safetensors"]
    assert before["experts/expert-000.safetensors"] != after["experts/expert-000.safetensors"]


def test_a_norm_is_rescaled_only_where_all_its_readers_are_rounded(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    """Experts in BF16 beside shared layers in four bits: nothing may change them, not even exact factors."""
    run(model, tmp_path / "s", all_parts("awq", experts="bf16", shared="w4g64"), stats)
    with Store.open(tmp_path / "s") as store:
        gate, up, down = expert_matrices(store, ExpertId(1, 0))
        for part, found in (("gate", gate), ("up", up), ("down", down)):
            assert np.array_equal(found, model.source.arrays[f"1.0.{part}"])
        assert np.array_equal(
            store.plain("layers.1.ffn_norm.weight"), model.source.arrays["layers.1.ffn_norm.weight"]
        )
        assert not np.array_equal(
            store.plain("layers.1.attn_norm.weight"), model.source.arrays["layers.1.attn_norm.weight"]
        )


@pytest.mark.parametrize("method", ["gptq", "awq+gptq", "smooth"])
def test_a_stopped_conversion_ends_the_same(
    model: SmallModel, stats: CalibrationStats, method: str, tmp_path: Path
) -> None:
    """Ctrl-C among the experts; the rest is made with the same factors, whatever was searched before."""
    options, sources = all_parts(method, experts="w4g32"), (model.spec, model.targets, model.experts)
    run(model, tmp_path / "whole", options, stats)

    def stop(done: int, total: int, what: str) -> None:
        if "expert 3" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model.source, *sources, tmp_path / "s", options, progress=stop, stats=stats)
    assert run(model, tmp_path / "s", options, stats).records > 0
    assert digest(tmp_path / "s") == digest(tmp_path / "whole")


def test_other_statistics_continue_nothing(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    sources = model.source, model.spec, model.targets, model.experts
    with pytest.raises(KeyboardInterrupt):
        convert(*sources, tmp_path / "s", all_parts("gptq"), progress=stop, stats=stats)
    other = make_stats(tmp_path / "other", model, seed=1)
    with pytest.raises(StoreError, match=r"options: stats is [0-9a-f]{16} there, [0-9a-f]{16} now\n"):
        run(model, tmp_path / "s", all_parts("gptq"), other)


@pytest.mark.parametrize("damage", ["cut off", "a byte of the moments", "a byte of a maximum"])
def test_damaged_statistics_are_refused_before_anything_is_written(
    model: SmallModel, tmp_path: Path, damage: str
) -> None:
    """Found midway, they left an unfinished store that no other statistics could continue."""
    stats = make_stats(tmp_path / "stats", model)
    layout = {entry.name: entry for entry in stats_layout(stats.info).entries}
    data = bytearray(stats.path.read_bytes())
    if damage == "cut off":
        data = data[:-100]
    else:
        name = "moments" if "moments" in damage else "absmax"
        entry = layout[f"layers.1.attn.out.weight.{name}"]
        data[entry.offset + 2] ^= 1
    stats.path.write_bytes(data)
    with pytest.raises(
        StrataError, match=r"(checksum differs|truncated: )[^\0]*remedy: run `strata calibrate` again"
    ):
        run(model, tmp_path / "s", all_parts("gptq"), CalibrationStats(stats.path))
    assert [path.name for path in tmp_path.iterdir()] == ["stats"]


def test_formats_of_parts_that_are_not_there_are_remarked(tmp_path: Path) -> None:
    """Not refused: the same options may be meant for several models."""
    model = whole_model(replace(SPEC, tied_head=True, moe_layers=(False, False)))
    report = run(model, tmp_path / "s", ConvertOptions(experts="w8", head="w8"), None)
    name = model.spec.name
    assert report.notes == (
        f"experts: w8 has no effect, {name} has no routed experts",
        f"head: w8 has no effect, {name} has no output matrix of its own: the embedding is used",
    )
    other = run(whole_model(SPEC), tmp_path / "t", ConvertOptions(experts="w8"), None)
    assert not any("no effect" in note for note in other.notes)


def test_mla_is_rounded_head_by_head(tmp_path: Path) -> None:
    model = whole_model(mla_spec())
    stats = make_stats(tmp_path / "stats", model)
    run(model, tmp_path / "s", all_parts("gptq", shared="w4g32"), stats)
    name, fmt = "layers.1.attn.k_b.weight", FORMATS["w4g32"]
    with Store.open(tmp_path / "s") as store:
        found, wanted = unpack(store.tensor(name)), model.source.arrays[name]
    plain = dequantize(fmt, quantize(wanted, fmt, ""))
    for head in range(4):
        rows, inputs = slice(20 * head, 20 * head + 20), Inputs.of(stats.linear(name, head))
        assert inputs.cost((found - wanted)[rows]) < inputs.cost((plain - wanted)[rows])


def test_formats_stand_by_their_bytes_and_those_of_the_source_are_named(
    model: SmallModel, tmp_path: Path
) -> None:
    run(model, tmp_path / "s", ConvertOptions(experts="bf16", shared="w4g64", head="w8", embed="w8"), None)
    manifest = read_manifest(tmp_path / "s")
    words, rounded = formats_in_words(manifest).split("+"), lossy_formats(manifest).split("+")
    assert words == ["bf16 (as in the source)", *rounded] and set(rounded) == {"w4g64", "w8"}
    assert all_formats(manifest) == "+".join(["bf16", *rounded])


def test_methods_and_statistics_belong_together(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="need statistics") as caught:
        run(model, tmp_path / "s", all_parts("gptq"), None)
    assert "strata calibrate" in caught.value.remedy
    with pytest.raises(UsageError, match="every part is rounded plainly"):
        run(model, tmp_path / "s", ConvertOptions(), stats)
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (replace(SPEC, tied_head=False), "experts=gptq, shared=gptq, head=gptq"),
        (replace(SPEC, tied_head=True), "experts=gptq, shared=gptq"),
        (replace(SPEC, tied_head=True, moe_layers=(False, False)), "shared=gptq"),
    ],
)
def test_only_parts_that_the_model_has_are_named(spec: ModelSpec, named: str, model: SmallModel) -> None:
    with pytest.raises(UsageError, match=f"methods {named} need"):
        with_stats(all_parts("gptq"), None, model.source, spec, [])


def test_statistics_of_another_model_are_refused(stats: CalibrationStats, tmp_path: Path) -> None:
    other = whole_model(SPEC, seed=5)
    with pytest.raises(UsageError, match=r"fingerprint [0-9a-f]{16}.*the model is tiny \(fingerprint"):
        run(other, tmp_path / "s", all_parts("awq"), stats)
    assert not (tmp_path / "s.partial").exists()


def test_gptq_without_moments_is_refused_and_awq_is_not(model: SmallModel, tmp_path: Path) -> None:
    stats = make_stats(tmp_path / "stats", model, moments=False)
    with pytest.raises(UsageError, match=r"stats has no second moments, which gptq needs"):
        run(model, tmp_path / "gptq", all_parts("gptq"), stats)
    run(model, tmp_path / "awq", all_parts("awq"), stats)
    assert verify_store(tmp_path / "awq").problems == ()


def test_options_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="unknown method 'gtpq'"):
        all_parts("gtpq")
    with pytest.raises(UsageError, match="method of part 'embed'"):
        all_parts("embed=gptq")
    with pytest.raises(UsageError, match=r"alpha is 1\.5"):
        all_parts("awq", alpha=1.5)


def test_a_format_without_integers_is_refused(
    model: SmallModel, stats: CalibrationStats, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="experts: gptq makes integers with a scale, mxfp4 has none"):
        run(model, tmp_path / "s", all_parts("gptq", experts="mxfp4"), stats)


def test_nan_in_the_weights_is_refused_by_every_method(stats: CalibrationStats, tmp_path: Path) -> None:
    model = whole_model(SPEC)
    model.source.arrays["1.3.down"] = model.source.arrays["1.3.down"].copy()
    model.source.arrays["1.3.down"][2, 5] = np.nan
    for method in ("gptq", "awq"):
        with pytest.raises(WeightValueError, match=r"1\.3\.down: nan at \[2, 5\]"):
            run(model, tmp_path / method, all_parts(method), stats)
    report = run(model, tmp_path / "s", all_parts("awq+gptq", allow_nan=True), stats)
    assert report.replaced == {"1.3.down": 1}
