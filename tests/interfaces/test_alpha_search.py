"""`strata convert --alpha perplexity`: what is kept, what goes on, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import CONTEXT, write_checkpoint

from strata.interfaces import alpha_search
from strata.interfaces.alpha_search import GRID, PER_PLACE
from strata.store.calibration import CalibrationStats, stats_layout
from strata.store.manifest import read_manifest

ASKED = ("--experts", "w8", "--shared", "w8", "--method", "smooth", "--alpha", "perplexity")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The five boxing wizards jump quickly. " * 30)
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three candidates; windows stay longer than the tiny model's context."""
    monkeypatch.setattr(alpha_search, "GRID", (None, 0.3, 0.7))


def scripted(monkeypatch: pytest.MonkeyPatch, perplexities: dict[float | None, float]) -> list[float | None]:
    """Candidates give these instead of being made; KeyboardInterrupt where there is none."""
    tried: list[float | None] = []

    def measured(self: Any, alpha: float | None) -> float:
        tried.append(alpha)
        if alpha not in perplexities:
            raise KeyboardInterrupt
        return perplexities[alpha]

    monkeypatch.setattr(alpha_search.Search, "_measured", measured)
    return tried


@pytest.mark.usefixtures("few")
def test_the_best_of_the_grid_is_kept_with_what_all_gave(
    strata: Any, checkpoint: Path, statistics: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    done = strata("convert", checkpoint, "--out", out, *ASKED, "--stats", statistics, "--data", text)
    assert done.code == 0, done.err
    options = read_manifest(out).options
    found = options["searched"]["found"]
    assert list(found) == [PER_PLACE, "0.3", "0.7"] and all(value > 1 for value in found.values())
    best = min(found, key=found.get)
    assert options["alpha"] == (None if best == PER_PLACE else float(best))
    assert options["searched"]["activations"] == "int8_per_token" and options["searched"]["window"] == CONTEXT
    assert f"alpha 0.3: perplexity {found['0.3']:.4f}" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "text.txt"]
    assert strata("verify", out).code == 0


@pytest.mark.usefixtures("few")
def test_an_interrupted_search_goes_on_with_what_is_left(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    asked = ("convert", checkpoint, "--out", out, *ASKED, "--stats", statistics)
    tried = scripted(monkeypatch, {None: 9.0})
    stopped = strata(*asked)
    assert stopped.code == 130 and tried == [None, 0.3] and not out.exists()
    assert "goes on with the alphas that are left" in stopped.err
    tried = scripted(monkeypatch, {0.3: 7.0, 0.7: 8.0})
    assert strata(*asked).code == 0 and tried == [0.3, 0.7]
    options = read_manifest(out).options
    assert options["alpha"] == 0.3
    assert options["searched"]["found"] == {PER_PLACE: 9.0, "0.3": 7.0, "0.7": 8.0}
    shown = strata("inspect", out).out
    assert "smooth, alpha 0.3: unmeasured" in shown


@pytest.mark.usefixtures("few")
def test_figures_of_another_conversion_are_not_taken_up(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", statistics)
    scripted(monkeypatch, {None: 9.0})
    strata(*asked)
    tried = scripted(monkeypatch, {None: 3.0, 0.3: 7.0, 0.7: 8.0})
    assert strata(*asked, "--head", "bf16").code == 0 and tried == [None, 0.3, 0.7]


def test_the_grid_begins_with_what_a_conversion_does_by_itself() -> None:
    assert GRID[0] is None and len(set(GRID)) == len(GRID)
    assert all(alpha is None or 0 < alpha < 1 for alpha in GRID)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "gptq"], "--alpha is of awq and smooth"),
        (["--method", "smooth", "--budget", "1MiB"], "goes neither with --budget nor with --further"),
        (["--method", "smooth", "--alpha", "best"], "'best' is neither a number nor perplexity"),
        (["--method", "smooth", "--alpha", "1.5"], "alpha is 1.5"),
        (
            ["--method", "smooth", "--alpha", "0.5", "--data", "text"],
            "--data has an effect with --alpha",
        ),
    ],
)
def test_what_cannot_be_is_said(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "store"
    grid = () if "--alpha" in arguments else ("--alpha", "perplexity")
    result = strata("convert", checkpoint, "--out", out, "--stats", statistics, *grid, *arguments)
    assert result.code == 2 and message in result.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"), [("", "texts are empty"), ("a", "has 1 token, needed are 2")]
)
def test_a_text_without_a_prediction_is_refused_before_anything_is_written(
    strata: Any, checkpoint: Path, statistics: Path, text: Path, tmp_path: Path, content: str, message: str
) -> None:
    text.write_text(content)
    asked = ("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", statistics)
    result = strata(*asked, "--data", text)
    assert result.code == 2 and message in result.err and list(tmp_path.iterdir()) == [text]


def test_statistics_of_another_model_are_refused_before_anything_is_written(
    strata: Any, statistics: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=5)
    result = strata("convert", other, "--out", tmp_path / "store", *ASKED, "--stats", statistics)
    assert result.code == 2 and "fingerprint" in result.err and list(tmp_path.iterdir()) == [other]


def test_damaged_statistics_are_refused_before_anything_is_written(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path
) -> None:
    layout = {entry.name: entry for entry in stats_layout(CalibrationStats(statistics).info).entries}
    data = bytearray(statistics.read_bytes())
    data[layout["layers.1.attn.out.weight.mean_abs"].offset] ^= 1
    (damaged := tmp_path / "damaged.stats").write_bytes(data)
    result = strata("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", damaged)
    assert result.code == 1 and "the checksum differs\n  remedy: run `strata calibrate` again" in result.err
    assert list(tmp_path.iterdir()) == [damaged]


def test_a_folder_of_somebody_else_is_left_alone(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "store.alpha"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    result = strata("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", statistics)
    assert result.code == 1 and "no search made it" in result.err
    assert (theirs / "notes.txt").read_text() == "mine"


def test_one_that_was_killed_while_it_tidied_up_is_in_nobodys_way(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is the last thing that goes, so that nothing but an empty folder is without one."""
    asked = ("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", statistics, "--force")
    scripted(monkeypatch, dict.fromkeys(GRID, 5.0))
    removed: list[Path] = []
    monkeypatch.setattr(alpha_search, "remove_tree", removed.append)
    assert strata(*asked).code == 0
    folder = tmp_path / "store.alpha"
    assert removed[-2:] == [folder / "store", folder]
    monkeypatch.undo()
    tried = scripted(monkeypatch, dict.fromkeys(GRID, 5.0))
    (folder / "found.json").unlink()
    assert strata(*asked).code == 0 and tried == list(GRID) and not folder.exists()


def test_a_damaged_record_begins_anew(
    strata: Any, checkpoint: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store.alpha"
    folder.mkdir()
    (folder / "found.json").write_text(json.dumps(["nothing", {"like": "it"}]))
    tried = scripted(monkeypatch, dict.fromkeys(GRID, 5.0))
    result = strata("convert", checkpoint, "--out", tmp_path / "store", *ASKED, "--stats", statistics)
    assert result.code == 0, result.err
    assert tried == list(GRID) and not folder.exists()
