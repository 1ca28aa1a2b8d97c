"""Broken and malicious checkpoints through the commands: an exit code, a sentence, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hangs import soon
from safetensors.numpy import load_file, save_file

from strata.errors import FileFormatError
from strata.interfaces import cli
from strata.interfaces.importing import import_checkpoint
from strata.store.options import ConvertOptions

HOSTILE = Path(__file__).resolve().parents[3] / "shared/cases/hostile"
MANIFEST: list[dict[str, Any]] = (
    json.loads((HOSTILE / "manifest.json").read_text()) if HOSTILE.is_dir() else []
)


@pytest.mark.parametrize("item", MANIFEST, ids=[item["file"] for item in MANIFEST])
def test_no_command_takes_a_hostile_file(
    item: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """case-01, case-02, case-04, case-05, case-06: inspect, convert and run."""
    path = str(HOSTILE / item["file"])
    before = sorted(HOSTILE.rglob("*"))
    commands = (
        ["inspect", path],
        ["convert", path, "--out", str(tmp_path / "out")],
        ["run", "-m", path, "--prompt", "x", "--set", f"model.cache_dir={tmp_path / 'cache'}"],
    )
    for arguments in commands:
        with soon():
            assert cli.run(arguments) in (1, 2), arguments
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert "internal error" not in captured.err and "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == [] and sorted(HOSTILE.rglob("*")) == before


def damaged(checkpoint: Path, folder: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    """A copy of a good checkpoint with one other value."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][index] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_stop_a_conversion(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], value: float
) -> None:
    """case-22: tensor and index in the message, no store; with --allow-nan the manifest counts them."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    source = damaged(checkpoint, tmp_path / "model", name, (5, 7), value)
    out = tmp_path / "store"
    assert cli.run(["convert", str(source), "--out", str(out)]) == 1
    error = capfd.readouterr().err
    assert f"{name}: {value} at [5, 7]" in error and "--allow-nan" in error
    assert not out.exists()
    assert cli.run(["convert", str(source), "--out", str(out), "--allow-nan"]) == 0
    assert json.loads((out / "manifest.json").read_text())["replaced"] == {name: 1}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_tokenizer_file_that_links_outside_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """case-04: a link in a downloaded folder must not put a file of this machine into the store."""
    source = tmp_path / "model"
    shutil.copytree(checkpoint, source)
    (source / name).rename(tmp_path / "secret")
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(FileFormatError, match=f"'{name}' leads outside the model directory"):
        import_checkpoint(source, tmp_path / "store", ConvertOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "secret"]
