"""`strata convert --method` as its users see it: from a checkpoint to a store that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.store.reader import Store

EVERY = [word for part in ("experts", "shared", "head", "embed") for word in (f"--{part}", "w8")]


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", ""], "--method is followed by an empty value"),
        (["--method", " "], "unknown method ' '"),
        (["--alpha", "0.5"], "alpha is 0.5, which is of the methods awq and smooth: none is asked for"),
        (["--alpha", "0.5", "--method", "gptq", "--stats", "STATS"], "awq and smooth: experts=gptq"),
        (["--no-act-order"], "(--no-act-order) is of the method gptq"),
        (["--no-act-order", "--method", "awq", "--stats", "STATS"], "is of the method gptq: experts=awq"),
        (["--act-order"], "--act-order is of the method gptq"),
        (["--requantize", *EVERY], "--requantize is for parts in auto, and there are none: experts=w8"),
        (["--budget", "1MiB", "--stats", "STATS", *EVERY], "has no format to choose"),
        (["--budget", "0", "--stats", "STATS"], "--budget 0 leaves no byte for a weight"),
        (
            ["--stats", "missing.stats"],
            "cannot open: No such file or directory\n  remedy: check the path; `strata cal",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(
    strata: Any, checkpoint: Path, stats: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    before = sorted(tmp_path.iterdir())
    asked = [str(stats) if word == "STATS" else word for word in arguments]
    result = strata("convert", checkpoint, "--out", tmp_path / "store", *asked)
    assert result.code == 2 and words in result.err and "remedy: " in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_is_no_source(strata: Any, tmp_path: Path) -> None:
    result = strata("convert", "demo", "--out", tmp_path / "store")
    assert result.code == 2 and "is a store already" in result.err and "GGUF" in result.err
    assert not (tmp_path / "store").exists()


def test_a_part_has_one_method(strata: Any, checkpoint: Path, stats: Path, tmp_path: Path) -> None:
    twice = "experts=gptq,experts=awq"
    result = strata("convert", checkpoint, "--out", tmp_path / "store", "--method", twice, "--stats", stats)
    assert result.code == 2 and "experts has two methods, gptq and awq" in result.err
