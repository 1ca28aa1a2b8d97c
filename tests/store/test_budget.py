"""Formats under a byte budget: never above it, always the same, and bits go where errors hurt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SmallModel, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_model import write_stats

from strata.errors import CapacityError, UsageError
from strata.store.budget import Choice, Offer, choose_formats, spend, spend_best
from strata.store.budget_errors import Unit, relative_error
from strata.store.calibration import CalibrationStats, StatsInfo, model_fingerprint
from strata.store.calibration_inputs import expert_input, linear_inputs
from strata.store.calibration_writer import MemberStats
from strata.store.convert import convert
from strata.store.formats import FORMATS
from strata.store.manifest import MANIFEST, read_manifest
from strata.store.names import layer
from strata.store.options import ConvertOptions
from strata.store.quantize import quantize
from strata.store.reader import Store
from strata.store.source import SourceRows, TargetTensor
from strata.store.unconverted import UnconvertedStore

OFFERS = st.lists(
    st.builds(Offer, st.sampled_from("abcdef"), st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=4
)


@given(several=st.lists(OFFERS, min_size=1, max_size=6), available=st.integers(0, 500))
def test_a_choice_fits_and_no_better_step_is_left(several: list[list[Offer]], available: int) -> None:
    offers = {Unit("experts", i): found for i, found in enumerate(several)}
    least = sum(min(offer.bytes for offer in found) for found in several)
    if least > available:
        with pytest.raises(CapacityError):
            spend(offers, available)
        return
    chosen = spend(offers, available)
    left = available - sum(offer.bytes for offer in chosen.values())
    assert chosen == spend(offers, available) and left >= 0
    for unit, now in chosen.items():
        assert not any(o.error < now.error and o.bytes - now.bytes <= left for o in offers[unit])


def test_bytes_go_where_they_take_most_error_away() -> None:
    offers = {
        Unit("experts", 0): [Offer("w4g64", 10, 0.5), Offer("w8", 20, 0.1)],
        Unit("experts", 1): [Offer("w4g64", 10, 0.2), Offer("w8", 20, 0.1)],
    }
    chosen = spend(offers, 30)
    assert [offer.format for offer in chosen.values()] == ["w8", "w4g64"]


def test_a_large_step_is_taken_where_many_small_ones_help_less() -> None:
    """Alone, the steps of the layers come first, and leave too little for the head."""
    layers = {Unit("experts", i): [Offer("w4g64", 10, 0.5), Offer("w8", 11, 0.45)] for i in range(4)}
    offers = {**layers, Unit("head"): [Offer("w4g64", 20, 1.0), Offer("w8", 60, 0.1)]}
    assert spend(offers, 101)[Unit("head")].format == "w4g64"
    chosen = spend_best(offers, 101, 101, 0)
    assert chosen[Unit("head")].format == "w8"
    assert sum(offer.bytes for offer in chosen.values()) == 101


def whole_model(**sizes: Any) -> SmallModel:
    """small_model with the norms that say which model it is."""
    model = small_model(**sizes)
    spec, random = model.spec, np.random.default_rng(9)

    def plain(name: str, *shape: int) -> None:
        model.source.arrays[name] = random.standard_normal(shape).astype(np.float32)
        model.targets.append(TargetTensor(name, (SourceRows(name),), shape, "plain"))

    for index in range(spec.layers):
        for part in ("attn_norm.weight", "ffn_norm.weight"):
            plain(layer(index, part), spec.hidden)
    return model


def statistics(model: SmallModel, path: Path, shares: dict[int, list[int]] | None = None) -> CalibrationStats:
    """All inputs alike; shares: tokens of a layer's experts."""
    plain = UnconvertedStore(model.source, model.spec, model.targets, model.experts).plain
    fingerprint = model_fingerprint(model.spec, plain)
    info = StatsInfo(model.spec, fingerprint, 100, 10, 0, False, (), "test")

    def members() -> Any:
        for entry in linear_inputs(model.spec):
            for member in range(entry.members):
                tokens = 50
                for at, counts in (shares or {}).items():
                    if entry.name.startswith(expert_input(at, "gate_up")) and entry.members > 1:
                        tokens = counts[member]
                yield entry.name, member, MemberStats(tokens, np.ones((4, entry.cols), np.float32), None)

    write_stats(path, info, members())
    return CalibrationStats(path)


def chosen(model: SmallModel, stats: CalibrationStats, budget: int, **options: Any) -> Choice:
    asked = ConvertOptions(slices=1, **options)
    return choose_formats(model.source, model.spec, model.targets, model.experts, asked, stats, budget)


def bytes_with(model: SmallModel, out: Path, **options: Any) -> int:
    convert(model.source, model.spec, model.targets, model.experts, out, ConvertOptions(slices=1, **options))
    return sum(entry.bytes for entry in read_manifest(out).files)


@settings(max_examples=6)
@given(share=st.floats(0, 1))
def test_the_store_is_as_large_as_was_said_and_no_larger(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    tmp_path = tmp_path_factory.mktemp("budget")
    model = whole_model(layers=3)
    stats = statistics(model, tmp_path / "s")
    parts = dict.fromkeys(("experts", "shared", "embed"))
    small = bytes_with(model, tmp_path / "a", **dict.fromkeys(parts, "w4g64"))
    large = bytes_with(model, tmp_path / "b", **dict.fromkeys(parts, "bf16"))
    budget = int(small + 30_000 + share * (large - small))
    choice = chosen(model, stats, budget)
    out = tmp_path / "store"
    convert(model.source, model.spec, model.targets, model.experts, out, choice.options)
    found = sum(entry.bytes for entry in read_manifest(out).files)
    assert found == choice.bytes <= budget
    recorded = json.loads((out / MANIFEST).read_text())["options"]["budget"]
    assert recorded["bytes"] == budget and set(recorded["errors"]) == {unit.key for unit in choice.chosen}
    Store.open(out).close()
    for unit, offer in choice.chosen.items():
        if unit.part == "experts":
            assert read_manifest(out).layers[unit.layer or 0].gate_up == offer.format


def test_too_small_a_budget_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = whole_model()
    with pytest.raises(CapacityError, match=r"smallest formats take .*, the budget is 1000 bytes \("):
        chosen(model, statistics(model, tmp_path / "s"), 1000)


def test_what_is_asked_for_stays(tmp_path: Path) -> None:
    model = whole_model(layers=3)
    stats = statistics(model, tmp_path / "s")
    choice = chosen(model, stats, 1 << 30, shared="w4g128", overrides={"experts.2": "w4g32"})
    assert [unit.key for unit in choice.chosen] == ["experts.1", "embed"]
    assert choice.options.wanted("experts", 2) == "w4g32" and choice.options.wanted("experts", 1) == "bf16"


@pytest.mark.parametrize("hot", [1, 2])
def test_the_layer_whose_busy_experts_suffer_gets_the_bits(hot: int, tmp_path: Path) -> None:
    """All experts but the first are on the four-bit grid already, and the first is busy in one layer only."""
    model = whole_model(layers=3)
    for expert in (expert for expert in model.experts if expert.index > 0):
        for block in (expert.gate, expert.up, expert.down):
            values = model.source.arrays[block.name]
            values[:] = np.clip(np.rint(values / 0.05 * 3), -8, 7) / 64
            values[:, ::32] = -8 / 64
    shares = {layer: [97, 1, 1, 1] if layer == hot else [1, 33, 33, 33] for layer in (1, 2)}
    stats = statistics(model, tmp_path / "s", shares)
    fixed = {"shared": "w4g128", "embed": "w8"}
    less = bytes_with(model, tmp_path / "a", experts="w4g128", **fixed)
    more = bytes_with(model, tmp_path / "b", experts="w4g128", overrides={f"experts.{hot}": "w8"}, **fixed)
    choice = chosen(model, stats, more + 30_000, **fixed)
    assert more > less + 30_000
    assert choice.chosen[Unit("experts", hot)].bytes > choice.chosen[Unit("experts", 3 - hot)].bytes


def test_errors_count_by_what_the_columns_read() -> None:
    rows = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    rows[:, 0] = 100
    quiet, loud = (np.ones(128, np.float32) for _ in range(2))
    quiet[0] = 0
    fmt = FORMATS["w4g64"]
    assert relative_error([(rows, quiet)], quantize, fmt) > 20 * relative_error([(rows, loud)], quantize, fmt)
    assert relative_error([(rows * 0, loud)], quantize, fmt) == 0


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    stats = statistics(whole_model(), tmp_path / "s")
    other = whole_model()
    other.source.arrays["norm"][0] += 1
    with pytest.raises(UsageError, match="fingerprint"):
        chosen(other, stats, 1 << 30)
