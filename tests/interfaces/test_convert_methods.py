"""`strata convert --method` as its users see it: from a checkpoint to a store that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.store.reader import Store


@pytest.fixture
def stats(strata: Any, checkpoint: Path, tmp_path: Path) -> Path:
    text, out = tmp_path / "some.txt", tmp_path / "stats"
    text.write_text("The quick brown fox jumps over the lazy dog. 1234567890 " * 9)
    assert strata("calibrate", checkpoint, "--data", text, "--out", out, "--min-tokens", 50).code == 0
    return out


def test_methods_by_part_make_a_store_that_runs(
    strata: Any, checkpoint: Path, stats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    asked = [
        "convert",
        checkpoint,
        "--out",
        out,
        "--method",
        "experts=awq+gptq,shared=gptq",
        "--stats",
        stats,
    ]
    result = strata(*asked, "--no-act-order", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["records"] > 0
    with Store.open(out) as store:
        options = store.manifest.options
    assert options["methods"] == {"experts": "awq+gptq", "shared": "gptq"}
    assert options["act_order"] is False and len(options["stats"]) == 16
    assert strata("run", out, "--prompt", "hi", "-n", 3, "--temp", 0).code == 0


def test_what_is_missing_is_said(strata: Any, checkpoint: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    result = strata("convert", checkpoint, "--out", out, "--method", "gptq")
    assert result.code == 2 and "need statistics" in result.err and "strata calibrate" in result.err
    result = strata("convert", checkpoint, "--out", out, "--stats", stats)
    assert result.code == 2 and "every part is rounded plainly" in result.err
    result = strata("convert", checkpoint, "--out", out, "--method", "gtpq", "--stats", stats)
    assert result.code == 2 and "unknown method 'gtpq'" in result.err
    assert not out.exists()


def test_a_store_is_no_source(strata: Any, tmp_path: Path) -> None:
    result = strata("convert", "demo", "--out", tmp_path / "store")
    assert result.code == 2 and "is a store already" in result.err and "GGUF" in result.err
    assert not (tmp_path / "store").exists()


def test_a_part_has_one_method(strata: Any, checkpoint: Path, stats: Path, tmp_path: Path) -> None:
    twice = "experts=gptq,experts=awq"
    result = strata("convert", checkpoint, "--out", tmp_path / "store", "--method", twice, "--stats", stats)
    assert result.code == 2 and "experts has two methods, gptq and awq" in result.err
