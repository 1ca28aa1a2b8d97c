"""Stores that were smoothed for a scale per token, and where that and what products read is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.config import Override, load_config
from strata.interfaces.activations import describe

W8 = ("--experts", "w8", "--shared", "w8", "--head", "w8", "--embed", "w8")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((*W8, "--method", "smooth"), True),
        ((*W8, "--head", "bf16", "--method", "experts=smooth,shared=smooth"), True),
        ((*W8, "--method", "experts=smooth"), False),
        ((*W8, "--method", "awq"), False),
        ((*W8, "--experts", "w4g64", "--method", "smooth"), False),
        (("--layer-format", "experts.1=bf16", *W8, "--method", "smooth"), False),
        (W8, False),
    ],
)
def test_inspect_says_what_was_smoothed(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, options: tuple[str, ...], wanted: bool
) -> None:
    stats = ("--stats", statistics) if "--method" in options else ()
    assert strata("convert", checkpoint, "--out", tmp_path / "s", *options, *stats).code == 0
    shown = strata("inspect", tmp_path / "s")
    assert ("inputs       smoothed for a scale per token: --set backend." in shown.out) == wanted
    assert json.loads(strata("inspect", tmp_path / "s", "--json").out)["smoothed"] == wanted


def test_a_run_says_what_is_not_the_default() -> None:
    assert describe(load_config(None, [])) == ""
    asked = load_config(None, [Override.parse("backend.activations=f32")])
    assert describe(asked) == "f32 (--set backend.activations)"


def test_reports_and_receipts_have_what_was_computed_with(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path
) -> None:
    out, cache = tmp_path / "s", f"model.cache_dir={tmp_path / 'cache'}"
    asked = ("convert", checkpoint, "--out", out, *W8, "--method", "smooth", "--stats", statistics)
    assert strata(*asked).code == 0
    arguments = ("--tokens", 60, "--window", 60, "--set", cache, "--record", "--json")
    inputs = ("--set", "backend.activations=int8_per_token")
    found = strata("eval", "compare", checkpoint, out, *arguments, *inputs)
    assert found.code == 0, found.err
    assert json.loads(found.out)["b"]["activations"] == "int8_per_token"
    (receipt,) = json.loads(strata("inspect", out, "--json").out)["receipts"]
    assert receipt["activations"] == "int8_per_token"
