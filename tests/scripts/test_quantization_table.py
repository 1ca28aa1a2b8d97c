"""The table's script: what it asks for, what it keeps, and the model it measures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import demo_checkpoint
import quantization_table
from quantization_table import ROWS, STEPS, FailedError, Row, Table, fill

from strata.interfaces.cli import run

EVAL = {
    "b": {"perplexity": 26.5},
    "perplexity_change": 0.0123,
    "perplexity_change_error": 0.001,
    "kl": {"mean": 0.012, "p99": 0.09},
    "top1": 0.978,
}


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": ",".join(STEPS), "rows": "", "seconds": None, **changes})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run; gptq's fail."""
    made: list[list[str]] = []

    def strata(*arguments: str | Path, isa: str = "") -> str:
        made.append([str(argument) for argument in arguments])
        if "gptq" in made[-1]:
            raise FailedError("error: no such option: --method")
        if made[-1][0] == "convert":
            Path(made[-1][made[-1].index("--out") + 1]).symlink_to(quantization_table.model_path("demo"))
        speeds = {
            "tokens_per_second": {"median": 50.0},
            "bytes_per_second": {"median": 2e10},
            "share": {"median": 0.8},
        }
        bench = {"subject": {}, "results": [{"kind": kind, **speeds} for kind in ("prefill", "decode")]}
        scored = {"perplexity": 25.0} if "perplexity" in made[-1] else EVAL
        return json.dumps(scored if made[-1][0] == "eval" else bench)

    monkeypatch.setattr(quantization_table, "strata", strata)
    return made


def test_rows_are_made_once_and_failures_are_said(calls: list[list[str]], tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name in ("bf16", "w4g64 plain", "w4g64 gptq", "bf16, KV int8")]
    table = Table("smollm2.gguf", tmp_path, ["--tokens", "64"], rows)
    fill(table, options())
    assert [call[0] for call in calls] == [
        *("convert", "eval", "bench", "bench") * 2,  # bf16, w4g64 plain; with AVX2 and with all there is
        *("calibrate", "convert"),  # gptq, which fails
        "eval",  # KV int8 has bf16's store and its speed
    ]
    shown = table.markdown()
    assert (
        "| 26.500 | +1.23 % ± 0.10 | 1.20e-02 | 9.00e-02 | 97.80 % | 50.0 t/s, 20.0 GB/s, 80 % | 50 t/s | 50"
        in shown
    )
    assert "| 25.000 | - | - | - | - | 50.0 t/s" in shown, "bf16 is what the others are measured against"
    assert "- w4g64 gptq: not made, `convert` says: error: no such option: --method" in shown
    assert "| w4g64 gptq |" not in shown
    calls.clear()
    again = Table("smollm2.gguf", tmp_path, [], rows)
    fill(again, options())
    assert not calls and again.markdown() == shown
    again.forget_failures()
    fill(again, options())
    assert calls and all(call[0] in ("calibrate", "convert") for call in calls)


def test_only_what_is_asked_for(calls: list[list[str]], tmp_path: Path) -> None:
    fill(Table("smollm2.gguf", tmp_path, [], ROWS), options(steps="convert", rows="w4g128,=w8"))
    assert [call[call.index("--experts") + 1] for call in calls] == ["w8", "w4g128"]
    calls.clear()
    fill(Table("smollm2.gguf", tmp_path, [], ROWS), options(seconds=-1.0))
    assert not calls


def test_rows_of_the_same_formats_and_settings_share_a_speed(calls: list[list[str]], tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name in ("bf16", "w4g64 plain", "w4g64 awq", "w8", "w8a8 plain")]
    table = Table("smollm2.gguf", tmp_path, [], rows)
    fill(table, options(steps="convert,bench"))
    timed = [call for call in calls if call[0] == "bench"]
    assert len(timed) == 2 * 4, "bf16, w8, w8a8 and one of the two in w4g64, with both instruction sets"
    assert not any("awq" in argument for call in timed for argument in call)
    shown = table.markdown().splitlines()
    assert all("50.0 t/s, 20.0 GB/s, 80 % | 50 t/s" in line for line in shown[2:7])


def test_an_interrupted_measurement_goes_on_with_the_other_instruction_set(
    calls: list[list[str]], tmp_path: Path
) -> None:
    table = Table("smollm2.gguf", tmp_path, [], [ROWS[0]])
    steps = table.missing(STEPS, [""])
    for _ in range(3):
        table.do(*next(steps))
    calls.clear()
    again = Table("smollm2.gguf", tmp_path, [], [ROWS[0]])
    assert "50.0 t/s, 20.0 GB/s, 80 % | 50 t/s | - | - |" in again.markdown()
    fill(again, options())
    assert [call[0] for call in calls] == ["bench"]
    assert "| - |" not in again.markdown().split("t/s", 1)[1]


def test_a_file_of_another_program_is_a_row(calls: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(b"1234")
    table = Table("smollm2.gguf", tmp_path, [], [Row("llama.cpp", {}, gguf=file)])
    fill(table, options())
    assert [call[0] for call in calls] == ["eval"] and str(file) in calls[0]
    shown = table.markdown()
    assert "| llama.cpp | 4 | 26.500 |" in shown and "decode" not in shown


def test_every_row_has_a_name_and_equal_stores_are_equal_conversions() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    made: dict[str, tuple[Any, ...]] = {}
    for row in ROWS:
        conversion = (dict(row.formats), row.method, row.stats, row.alpha)
        assert made.setdefault(row.store, conversion) == conversion


def test_the_demo_off_its_grid_says_what_the_demo_says(tmp_path: Path, capsys: Any) -> None:
    """Scales that were moved change the weights and nothing else; 4 bits cost what they do not the demo."""
    made = demo_checkpoint.write_checkpoint(tmp_path / "bf16")
    text = ["--tokens", "200", "--samples", "0", "--json", "--set", f"model.cache_dir={tmp_path}"]
    exact = ["--set", "kv.dtype=f32", "--set", "backend.activations=f32"]
    assert run(["eval", "compare", "demo", str(made), *text, *exact]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["kl"]["mean"] < 1e-3 and same["top1"] > 0.97
    rounded = ["--set-b", "convert.experts=w4g64", "--set-b", "convert.shared=w4g64"]
    assert run(["eval", "compare", str(made), *rounded, *text, *exact]) == 0
    assert json.loads(capsys.readouterr().out)["kl"]["mean"] > 20 * same["kl"]["mean"]


def test_expert_matrices_are_put_together_from_slices() -> None:
    """gate and up come out of their blocks of 8 rows: their products are those of the packed order."""
    from strata.core import ExpertId
    from strata.interfaces.bundled import model_path
    from strata.store.pack import unpack
    from strata.store.reader import Store

    with Store.open(model_path("demo")) as store:
        gate, up, down = demo_checkpoint.expert_matrices(store, ExpertId(1, 3))
        layout = store.expert_layout(1)
        assert gate.shape == up.shape == (layout.width, layout.hidden) == down.shape[::-1]
        packed = unpack(store.expert_part(ExpertId(1, 3), 1)[0])
    half = layout.width // layout.slices
    np.testing.assert_array_equal(gate[half : half + 8], packed[:8])
    np.testing.assert_array_equal(up[half : half + 8], packed[8:16])
