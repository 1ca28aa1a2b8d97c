"""scripts/accuracy.py: the figures of `strata eval compare`, for several settings in one pass."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import accuracy

from strata.interfaces.cli import run
from strata.interfaces.evaluation.texts import PROSE


def test_its_figures_are_those_of_eval_compare(capsys: Any) -> None:
    options = argparse.Namespace(text=PROSE, tokens=200, window=100, truth="f32", threads=None)
    found = accuracy.measure("demo", options)
    assert len(found) == len(accuracy.VARIANTS) - 1
    one = found["cpu, int8 activations, int8 KV"]
    truth = ("--set-a", "backend.activations=f32", "--set-a", "kv.dtype=f32")
    cut = ("--tokens", "200", "--window", "100", "--samples", "0", "--json")
    assert run(["eval", "compare", "demo", *truth, *cut, "--set-b", "kv.dtype=int8"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert one.divergence == pytest.approx(compared["kl"]["mean"], rel=1e-12)
    assert one.change == pytest.approx(compared["perplexity_change"], rel=1e-12)
    shown = accuracy.table(found, "f32")
    assert shown[2].startswith(f"| f32, f32 | {compared['a']['perplexity']:.4f} ")
    assert f"| {compared['b']['perplexity']:.4f} | " in shown[-1]
