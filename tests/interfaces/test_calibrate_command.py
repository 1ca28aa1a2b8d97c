"""`strata calibrate` as its users see it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strata.errors import UsageError
from strata.interfaces.calibration import TextFile, cut, default_texts
from strata.interfaces.evaluation.texts import PROSE
from strata.store.calibration import CalibrationStats

SOME = "The quick brown fox jumps over the lazy dog. 1234567890 "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(SOME * 9)
    return path


def test_a_checkpoint_and_its_store_give_nearly_the_same(
    strata: Any, checkpoint: Path, store: Path, text: Path, tmp_path: Path
) -> None:
    found = []
    for name, model in (("one", checkpoint), ("two", store)):
        out = tmp_path / name
        result = strata("calibrate", model, "--data", text, "--out", out, "--min-tokens", 0, "--json")
        assert result.code == 0, result.err
        report = json.loads(result.out)
        assert report["tokens"] == len(SOME) * 9 and report["starved"] == []
        assert [sum(counts) for counts in report["expert_tokens"].values()] == [2 * report["tokens"]] * 2
        found.append(CalibrationStats(out))
    one, two = found
    two.check_model(one.info.spec, one.info.fingerprint)  # formats differ, the model does not
    first = [stats.linear("layers.0.attn.qkv.weight") for stats in found]
    np.testing.assert_allclose(first[0].mean_square, first[1].mean_square, rtol=0.1)
    assert not np.array_equal(first[0].mean_square, first[1].mean_square)


@pytest.mark.parametrize(("formats", "said"), [("w4g64", True), ("bf16", False)])
def test_a_store_that_is_rounded_already_is_remarked(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path, formats: str, said: bool
) -> None:
    options = [f"--{part}={formats}" for part in ("experts", "shared", "head", "embed")]
    assert strata("convert", checkpoint, "--out", tmp_path / "store", *options).code == 0
    asked = ["--data", text, "--no-moments", "--out"]
    result = strata("calibrate", tmp_path / "store", *asked, tmp_path / "stats")
    assert result.code == 0
    assert (f"rounded already ({formats}): `strata convert` will need the checkpoint" in result.err) is said
    assert "rounded already" not in strata("calibrate", checkpoint, *asked, tmp_path / "others").err


def test_experts_that_starve_are_told(strata: Any, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    asked = ["calibrate", checkpoint, "--data", text, "--out", tmp_path / "s", "--no-moments"]
    result = strata(*asked, "--min-tokens", 10_000)
    assert result.code == 0
    assert "note: 8 of 8 experts saw fewer than 10000 tokens" in result.err and "layer 1: 0 (" in result.err
    assert "504 tokens: " in result.err and "378 KiB of hidden states on the disk" in result.err
    assert "504 tokens, 2 layers" in result.out
    again = strata(*asked)
    assert again.code == 1 and "exists already" in again.err
    assert strata(*asked, "--force").code == 0


def test_without_data_every_kind_of_text_is_read(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    result = strata(
        "calibrate", checkpoint, "--out", tmp_path / "s", "--tokens", 1200, "--window", 40, "--json"
    )
    report = json.loads(result.out)
    assert report["tokens"] == 1200 and "were asked for" not in result.err
    assert [file["name"] for file in report["data"]] == [
        f"{kind}.txt" for kind in ("code", "dialogue", "languages", "prose", "summaries")
    ]
    assert all(file["tokens"] >= 40 for file in report["data"])


def test_what_is_measured_on_is_not_calibrated_on() -> None:
    paragraphs = {line for line in PROSE.read_text().splitlines() if len(line) > 40}
    assert all(not paragraphs & set(text.data.decode().splitlines()) for text in default_texts())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "missing.txt"], 2, "missing.txt is no file"),
        (["--window", "257"], 2, "--window is 257, the model's context 256"),
        (["--data", "/dev/null"], 2, "/dev/null is no file"),
        (["--min-tokens", str(10**20)], 2, "is not in the range"),
        (["--data", "LETTER"], 2, "the calibration text has 1 token, needed are 2"),
    ],
)
def test_what_cannot_be_is_said(
    strata: Any, checkpoint: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "letter").write_text("x")
    asked = [str(tmp_path / "letter") if word == "LETTER" else word for word in arguments]
    result = strata("calibrate", checkpoint, "--out", tmp_path / "s", *asked)
    assert result.code == code and words in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_empty_texts_and_other_encodings_are_refused() -> None:
    tokenizer: Any = SimpleNamespace(encode=list, add_bos=False, bos_id=None)
    with pytest.raises(UsageError, match="are empty"):
        cut(tokenizer, [TextFile("a", b"")], 8, None)
    with pytest.raises(UsageError, match="a is not UTF-8"):
        cut(tokenizer, [TextFile("a", b"\xff")], 8, None)


def test_windows_begin_with_bos_and_come_evenly_from_all_texts() -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text: [ord(c) for c in text], add_bos=True, bos_id=1)
    texts = [TextFile("a", b"a" * 70), TextFile("b", b"b" * 21)]
    windows, data = cut(tokenizer, texts, 8, None)
    assert [len(ids) for ids in windows] == [8] * 13 and all(ids[0] == 1 for ids in windows)
    assert [file.tokens for file in data] == [80, 24]
    windows, data = cut(tokenizer, texts, 8, 40)
    assert len(windows) == 5 and [file.tokens for file in data] == [32, 8]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(2, 8), st.integers(2, 400))
def test_as_many_tokens_as_were_asked_for(lengths: list[int], window: int, limit: int) -> None:
    """Ends of texts are short windows: that many of them are not that many tokens."""
    tokenizer: Any = SimpleNamespace(encode=list, add_bos=False, bos_id=None)
    texts = [TextFile(str(i), bytes([i]) * length) for i, length in enumerate(lengths)]
    total = sum(lengths)
    assume(total)
    windows, data = cut(tokenizer, texts, window, limit)
    found = sum(map(len, windows))
    assert found == sum(file.tokens for file in data) <= total
    assert found == total if limit >= total else limit - 1 <= found <= limit


def test_less_text_than_was_asked_for_is_told(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    asked = ["calibrate", checkpoint, "--data", text, "--no-moments", "--out"]
    result = strata(*asked, tmp_path / "s", "--tokens", 5000)
    assert result.code == 0 and "5000 tokens were asked for, the texts have 504" in result.err
    assert "say little" not in result.err  # they are for second moments
    (tmp_path / "short.txt").write_text(SOME)
    result = strata("calibrate", checkpoint, "--data", tmp_path / "short.txt", "--out", tmp_path / "t")
    assert "56 tokens say little of vectors of 64 numbers" in result.err


def test_an_interrupted_run_goes_on(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata.engine.calibrate import run

    asked = ["calibrate", checkpoint, "--data", text, "--out", tmp_path / "s", "--json"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "_head", interrupted)
        result = strata(*asked)
        assert result.code == 130 and "the same command continues" in result.err
    assert json.loads(strata(*asked).out)["resumed"] == 2


def test_a_budget_chooses_formats_and_the_store_says_so(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    stats, out = tmp_path / "s", tmp_path / "store"
    assert strata("calibrate", checkpoint, "--data", text, "--out", stats, "--no-moments").code == 0
    asked = ["convert", checkpoint, "--out", out, "--budget"]
    result = strata(*asked, "100KiB", "--stats", stats)
    assert result.code == 1 and "the budget is 100 KiB (102,400 bytes)" in result.err
    assert strata(*asked, "1MiB").code == 2 and not out.exists()
    assert strata(*asked, "much", "--stats", stats).code == 2
    result = strata(*asked, "600KiB", "--stats", stats)
    assert result.code == 0, result.err
    assert " KiB of a budget of 600KiB" in result.err and "experts" in result.err
    assert "no KL" in result.err and "strata eval compare SOURCE STORE --record" in result.err
    options = json.loads((out / "manifest.json").read_text())["options"]
    assert options["budget"]["bytes"] == 600 << 10 and options["overrides"]
    assert strata("verify", out).code == 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_budget_holds_with_other_methods(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path, method: str
) -> None:
    stats, out = tmp_path / "s", tmp_path / "store"
    assert strata("calibrate", checkpoint, "--data", text, "--out", stats).code == 0
    asked = ["convert", checkpoint, "--out", out, "--budget", "600KiB", "--stats", stats, "--method", method]
    assert strata(*asked).code == 0
    assert sum(path.stat().st_size for path in out.rglob("*.safetensors")) <= 600 << 10
