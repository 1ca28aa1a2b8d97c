"""`strata eval perplexity` and `compare`: the demo and tiny models, what is printed, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import CONTEXT, write_checkpoint

from strata.interfaces.evaluation.texts import PROSE, Cut, read_text

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. " * 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


def test_perplexity_of_the_demo(strata: Any, text: Path) -> None:
    found = json.loads(strata("eval", "perplexity", "demo", "--text", text, "--window", 64, "--json").out)
    assert found["text"]["name"] == "fox.txt" and found["text"]["window"] == 64
    windows = -(-found["text"]["tokens"] // 64)
    assert found["text"]["predictions"] == found["text"]["tokens"] - windows
    assert 1 < found["perplexity"] < 100 and found["perplexity_error"] > 0
    shown = strata("eval", "perplexity", "demo", "--text", text, "--window", 64)
    assert f"perplexity {found['perplexity']:.4f}" in shown.out


def test_the_default_text_is_there(strata: Any) -> None:
    found = json.loads(strata("eval", "perplexity", "demo", "--tokens", 40, "--json").out)
    assert found["text"]["name"] == "prose.txt" and found["text"]["predictions"] == 39
    assert PROSE.stat().st_size > 30_000


def test_a_cheaper_setting_beside_its_reference(strata: Any, text: Path) -> None:
    arguments = ["eval", "compare", "demo", "--set", "backend.activations=f32", "--set-a", "kv.dtype=f32"]
    arguments += ["--set-b", "kv.dtype=int8", "--text", str(text), "--window", "64", "--tokens", "100"]
    found = json.loads(strata(*arguments, "--samples", 2, "--json").out)
    assert (found["a"]["kv_dtype"], found["b"]["kv_dtype"]) == ("f32", "int8")
    assert found["b"]["perplexity"] == pytest.approx(
        found["a"]["perplexity"] * (1 + found["perplexity_change"])
    )
    kl = found["kl"]
    assert 0 < kl["mean"] < 0.01 and kl["median"] <= kl["p99"] <= kl["max"]
    assert 0.9 < found["top1"] <= 1
    assert len(found["continuations"]) == 2
    shown = strata(*arguments).out
    assert "same top token" in shown and "greedy continuations" in shown
    assert "A  demo backend.activations=f32 kv.dtype=f32: perplexity" in shown
    assert "A with activations f32, KV f32; B with activations f32, KV int8" in shown


def test_a_model_beside_itself_has_lost_nothing(strata: Any, text: Path) -> None:
    found = json.loads(
        strata("eval", "compare", "demo", "demo", "--text", text, "--tokens", 90, "--json").out
    )
    assert found["kl"]["max"] == 0 and found["top1"] == 1 and found["perplexity_change"] == 0
    assert all(one["same_tokens"] is None and one["a"] == one["b"] for one in found["continuations"])


def test_texts_that_part_are_shown_from_there(strata: Any, store: Path, text: Path, tmp_path: Path) -> None:
    """Two random models agree on nothing."""
    other, cache = write_checkpoint(tmp_path / "other", seed=3), f"model.cache_dir={tmp_path}"
    arguments = ["--text", text, "--window", 32, "--samples", 1, "--set", cache]
    found = strata("eval", "compare", store, other, *arguments)
    assert found.code == 0, found.err
    assert (
        "greedy continuations: 1 of 1 part" in found.out and "    A " in found.out and "    B " in found.out
    )


def test_a_text_in_another_encoding_is_refused(strata: Any, tmp_path: Path) -> None:
    """What it says instead of its letters would be scored."""
    path = tmp_path / "latin1.txt"
    path.write_bytes("Stra\xdfe, Tor, Weg".encode("latin1"))
    found = strata("eval", "perplexity", "demo", "--text", path)
    assert found.code and "latin1.txt is not UTF-8" in found.err and "at byte 4 of 16" in found.err
    assert "iconv" in found.err


def test_llama_perplexity_s_protocol(text: Path) -> None:
    """Whole windows, and of each what lies behind its middle: n_ctx - 1 - n_ctx / 2 predictions."""
    from strata.interfaces.bundled import model_path
    from strata.interfaces.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_path("demo"))
    found = read_text(text, tokenizer, Cut(50, None, second_half=True))
    assert {len(window) for window in found.windows} == {50}
    assert found.predictions == len(found.windows) * (50 - 1 - 25)
    everything = read_text(text, tokenizer, Cut(50))
    assert everything.windows[: len(found.windows)] == found.windows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perplexity", "demo", "--window", "1"], "Invalid value for '--window'"),
        (
            ["perplexity", "demo", "--window", "99999"],
            "--window is 99999, the context of demo is 2048 tokens",
        ),
        (["perplexity", "demo", "--text", "/nowhere"], "/nowhere: No such file or directory"),
        (["perplexity", "demo", "--text", "/dev/null"], "/dev/null has 0 tokens, needed are 3"),
        (["perplexity", "/nowhere"], "/nowhere: no such file or directory"),
        (["compare", "demo"], "demo is compared with itself"),
        (["compare", "demo", "--set-b", "kv.dtyp=int8"], "did you mean 'dtype'?"),
    ],
)
def test_what_cannot_be_is_said(strata: Any, arguments: list[str], message: str) -> None:
    result = strata("eval", *arguments)
    assert result.code in (1, 2) and message in result.err and not result.out


def test_other_vocabularies_are_refused_with_both_sizes(strata: Any, store: Path) -> None:
    result = strata("eval", "compare", "demo", store, "--tokens", 60, "--window", CONTEXT // 2)
    assert result.code == 2 and "vocabulary of 4,096 tokens" in result.err
    assert f"{store} one of " in result.err


def test_the_error_is_small_where_there_is_much(strata: Any, text: Path) -> None:
    few, many = (
        json.loads(strata("eval", "perplexity", "demo", "--text", text, "--tokens", n, "--json").out)
        for n in (20, 240)
    )
    assert few["perplexity_error"] / few["perplexity"] > many["perplexity_error"] / many["perplexity"]
    assert math.isfinite(few["perplexity_error"])


def test_what_was_measured_stands_in_the_store(
    strata: Any, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    """Unmeasured is said; --record changes that in `inspect`, and in what `run` says at its start."""
    from strata.interfaces.quality import quality_of

    store = tmp_path / "store"
    assert strata("convert", checkpoint, "--out", store).code == 0
    shown = strata("inspect", store).out
    assert "quality      w" in shown and ": unmeasured" in shown and "--record" in shown
    arguments = ["--text", text, "--window", 64, "--set", f"model.cache_dir={tmp_path / 'cache'}"]
    found = strata("eval", "compare", checkpoint, store, *arguments, "--record", "--json")
    assert found.code == 0 and "recorded in" in found.err
    kl, top = json.loads(found.out)["kl"]["mean"], json.loads(found.out)["top1"]
    assert kl > 0
    line = f"KL {kl:.2g}, top-1 {100 * top:.1f} %"
    shown = strata("inspect", store).out
    assert line in shown and "against bf16 (" in shown and "--record" not in shown
    assert line in quality_of(store)
    receipts = json.loads(strata("inspect", store, "--json").out)["receipts"]
    assert [one["kl_mean"] for one in receipts] == [kl] and receipts[0]["text"] == "fox.txt"
    assert strata("verify", store).code == 0


@pytest.mark.parametrize("alpha", [0, 0.5])
def test_a_conversion_is_named_with_the_numbers_it_was_given(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, alpha: float
) -> None:
    asked = ("--experts", "w8", "--method", "smooth", "--stats", statistics, "--alpha", alpha, "--clip", 99)
    assert strata("convert", checkpoint, "--out", tmp_path / "store", *asked).code == 0
    assert f"smooth, alpha {alpha:g}, clip 99: unmeasured" in strata("inspect", tmp_path / "store").out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--set-b", "kv.dtype=f32"], "kv.dtype is int8 for A and f32 for B"),
        ([], "are the same store"),
    ],
)
def test_a_receipt_is_about_the_store(
    strata: Any, store: Path, text: Path, settings: list[str], message: str
) -> None:
    result = strata("eval", "compare", store, store, "--text", text, "--window", 32, "--record", *settings)
    assert result.code == 2 and message in result.err
    assert not (store / "receipts.json").exists()


def test_the_demo_is_not_written_to(strata: Any, text: Path, tmp_path: Path) -> None:
    import shutil

    from strata.interfaces.bundled import model_path

    copy = tmp_path / "demo"
    shutil.copytree(model_path("demo"), copy)
    result = strata("eval", "compare", copy, "demo", "--text", text, "--tokens", 40, "--record")
    assert result.code == 2 and "belongs to the package" in result.err


def test_the_demo_says_where_its_losses_stand(strata: Any) -> None:
    shown = strata("inspect", "demo").out
    assert ": unmeasured" in shown and "docs/demo-model.md" in shown and "--record" not in shown


def test_layers(strata: Any, text: Path) -> None:
    arguments = ["eval", "layers", "demo", "--set-a", "backend.activations=f32", "--text", str(text)]
    found = json.loads(strata(*arguments, "--tokens", 64, "--json").out)
    assert [one["layer"] for one in found["layers"]] == list(range(6)) and found["tokens"] == 64
    assert all(0 < one["own"] < 0.1 and 0.9 < one["cosine"] < 1 for one in found["layers"])
    assert all(0.5 < one["routes"] <= 1 and one["logits"] > 0 for one in found["layers"])
    shown = strata(*arguments, "--tokens", 64).out
    assert all(one["largest"] > one["max_abs"] for one in found["layers"])
    assert "  own error\n" in shown and "the largest magnitude in A's" in shown
    assert "layers that jump: none" in shown and "4 times the median layer's" in shown
    assert shown.count("\u2588") > 6


def test_layers_on_a_device(strata: Any, text: Path) -> None:
    """A device's arrays are its own: the layers' own errors are told from the relative ones."""
    arguments = ["eval", "layers", "demo", "--set-b", "device.use=emulated", "--text", str(text)]
    found = strata(*arguments, "--tokens", 32, "--json")
    assert found.code == 0, found.err
    rows = json.loads(found.out)["layers"]
    assert all(one["own"] is None and one["logits"] is None and one["routes"] > 0.9 for one in rows)
    assert all(one["cosine"] > 0.99 for one in rows)


def test_layers_of_other_models_are_refused(strata: Any) -> None:
    result = strata("eval", "layers", "demo", "demo-draft")
    assert result.code == 2 and "demo has 6 layers of 256, demo-draft 2 of 128" in result.err
