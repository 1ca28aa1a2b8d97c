"""`strata bench` as scripts see it: tables, CSV, JSON, refusals. Nothing is said about speed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import CONTEXT, write_checkpoint

from strata.engine.bench.figures import plan_cases
from strata.interfaces import cli
from strata.interfaces.commands.bench import command
from strata.interfaces.importing import import_checkpoint
from strata.store.options import ConvertOptions

SMALL = ("-p", "8", "-n", "2", "-d", "0,16", "-s", "1,2", "-r", "2", "-t", "2")
TESTS = ["pp8", "tg2", "tg2 x 2", "tg2 @ d16"]


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones read a gigabyte and compute for 50 ms, which proves nothing here."""
    monkeypatch.setattr(
        "strata.engine.bench.runs.read_bandwidth",
        lambda cpu, seconds: type("Fixed", (), {"best": 1e9 * cpu.threads})(),
    )
    monkeypatch.setattr("strata.engine.bench.runs.int8_peak", lambda cpu: 4e9 * cpu.threads)


def bench(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.run(["bench", *map(str, arguments)])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_markdown(capfd: Any, store: Path) -> None:
    code, out, err = bench(capfd, store, *SMALL)
    assert (code, err) == (0, "")
    head, rule, *lines = out.splitlines()
    names = cells(head)
    assert set(rule) <= set("|-: ") and len({line.count("|") for line in (head, rule, *lines)}) == 1
    rows = [dict(zip(names, cells(line), strict=True)) for line in lines]
    assert [row["test"] for row in rows] == TESTS
    for row in rows:
        assert float(row["t/s"]) > 0
        assert float(row["GB/s"]) >= 0 and row["memory"] == "2.0" and row["of memory"].endswith(" %")
        assert float(row["GMAC/s"]) >= 0 and row["int8 peak"] == "8.0" and row["of peak"].endswith(" %")
        low, high = map(float, row["min - max"].split(" - "))
        assert low <= float(row["t/s"]) <= high


def test_f32_arithmetic_is_not_put_beside_the_int8_peak(capfd: Any, store: Path) -> None:
    f32 = ("--set", "backend.activations=f32", "-p", "4", "-n", "1", "-d", "0", "-s", "1", "-r", "1")
    code, out, _ = bench(capfd, store, *f32)
    head, _, *lines = out.splitlines()
    rows = [dict(zip(cells(head), cells(line), strict=True)) for line in lines]
    assert code == 0 and [(row["int8 peak"], row["of peak"]) for row in rows] == [("-", "-")] * 2
    code, out, _ = bench(capfd, store, *f32, "--json")
    found = json.loads(out)
    assert found["subject"]["activations"] == "f32"
    assert all(result["peak_share"] is None and result["macs_per_second"] for result in found["results"])
    code, out, _ = bench(capfd, store, *f32, "--csv")
    assert code == 0 and all(row["peak_share"] == "" for row in csv.DictReader(io.StringIO(out)))


def test_json_and_csv_agree_in_structure(capfd: Any, store: Path) -> None:
    code, out, _ = bench(capfd, store, *SMALL, "--json")
    found = json.loads(out)
    assert code == 0 and found["subject"]["threads"] == 2 and found["subject"]["parameters"] > 0
    assert [result["test"] for result in found["results"]] == TESTS
    for result in found["results"]:
        assert len(result["runs"]) == 2 and result["bandwidth"]["median"] == 2e9
        run = result["runs"][0]
        assert run["tokens_per_second"] == pytest.approx(run["tokens"] / run["seconds"])
        assert run["share"] == pytest.approx(run["bytes"] / run["seconds"] / 2e9)
        assert run["peak_share"] == pytest.approx(run["macs"] / run["seconds"] / 8e9)
        assert result["int8_peak"]["median"] == 8e9 and run["after"] == {"bandwidth": 2e9, "int8_peak": 8e9}
    code, out, _ = bench(capfd, store, *SMALL, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["test"] for row in rows] == TESTS
    assert [(row["tokens"], row["depth"], row["streams"]) for row in rows][1:3] == [
        ("2", "0", "1"),
        ("2", "0", "2"),
    ]
    assert all(float(row["share"]) > 0 and float(row["peak_share"]) > 0 for row in rows)


def test_ops(capfd: Any, store: Path) -> None:
    code, out, _ = bench(capfd, store, "--ops", "-p", "0", "-n", "2", "-d", "16", "-s", "1", "-r", "1")
    assert code == 0 and "tg2 @ d16" in out and "outside of compiled code" in out
    names = {cells(line)[0] for line in out.splitlines() if line.startswith("|")}
    assert {"experts", "linear", "attention", "rms_norm", "add", "route", "plain_linear"} <= names
    code, out, _ = bench(capfd, store, "--ops", "-p", "0", "-n", "2", "-d", "0", "-s", "1", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and {"name", "shape", "seconds_per_call", "share"} <= set(rows[0])
    code, out, _ = bench(capfd, store, "--ops", "-p", "4", "-n", "0", "--json")
    (result,) = json.loads(out)["results"]
    assert 0 < result["step"]["outside_native"]["median"] < 1
    assert any("head" in op["shape"] and op["macs_per_second"] > 0 for op in result["ops"])
    assert {op["name"] for op in result["ops"] if op["peak_share"]} == {"linear", "experts"}


def test_without_options_it_measures_what_llama_bench_does() -> None:
    asked = command.make_context("bench", ["demo"]).params
    cases = plan_cases(*(asked[name] for name in ("prompts", "generate", "depths", "streams")))
    assert [case.label for case in cases] == ["pp512", "tg128"]


def test_cases_beyond_the_context_are_left_out(capfd: Any, store: Path) -> None:
    code, out, err = bench(capfd, store, "-p", "0", "-n", "1", "-d", "0,4096", "-r", "1")
    assert code == 0 and "tg1 " in out
    assert f"tg1 @ d4096 is left out: the model's context is {CONTEXT} tokens" in err
    code, out, err = bench(capfd, store, "-p", "9999", "-n", "0")
    assert (code, out) == (2, "") and f"no case fits the model's context of {CONTEXT} tokens" in err


def test_a_store_without_a_tokenizer(capfd: Any, tmp_path: Path) -> None:
    """The engine needs no text; every row of the vocabulary is then a token."""
    checkpoint = write_checkpoint(tmp_path / "bare")
    (checkpoint / "tokenizer.json").unlink()
    import_checkpoint(checkpoint, tmp_path / "store", ConvertOptions())
    code, out, _ = bench(capfd, tmp_path / "store", "-p", "4", "-n", "0", "-r", "1")
    assert code == 0 and "pp4" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is given"),
        (("STORE", "-p", "0", "-n", "0"), "nothing to measure"),
        (("STORE", "-n", "1,x"), "'1,x': numbers from 0 to"),
        (("STORE", "-n", ","), "numbers from 0 to"),
        (("STORE", "-s", "0"), "numbers from 1 to 64"),
        (("STORE", "-s", "65"), "numbers from 1 to 64"),
        (("STORE", "-d", "-5"), "numbers from 0 to"),
        (("STORE", "-p", "99999999999999999999"), "numbers from 0 to"),
        (("STORE", "-r", "0"), "repetitions"),
        (("STORE", "-t", "0"), "--threads: backend.threads"),
        (("STORE", "--csv", "--json"), "--csv and --json"),
        (("STORE", "-m", "STORE"), "two models"),
        (("STORE", "-n", "\u0661"), "numbers from 0 to"),
        (("STORE", "-n", "1_000"), "numbers from 0 to"),
        (("STORE", "--speculative", "--dry-launch"), "--speculative and --dry-launch"),
        (("STORE", "--speculative", "--csv"), "--csv has no effect with --speculative"),
        (("STORE", "--speculative", "--ops"), "--ops has no effect with --speculative"),
        (("STORE", "--speculative", "--timeline", "x.json"), "--timeline has no effect with --speculative"),
        (("STORE", "--speculative", "-n", "0"), "-n is 0: nothing to compare"),
        (("STORE", "--speculative", "-n", "1"), "-n is 1: nothing to compare"),
        (("STORE", "--dry-launch", "--csv"), "--csv has no effect with --dry-launch"),
        (("STORE", "--dry-launch", "--no-warmup"), "--no-warmup has no effect with --dry-launch"),
        (("STORE", "--dry-launch", "-s", "0"), "numbers from 1 to 64"),
        (("STORE", "--dry-launch", "--launch-us", "nan"), "--launch-us is no number"),
        (("STORE", "--dry-launch", "--launch-us", "inf"), "--launch-us"),
        (("STORE", "--dry-launch", "--launch-us", "-1"), "--launch-us"),
        (("STORE", "--dry-launch", "--launch-us", "x"), "--launch-us"),
        (("STORE", "--speculative", "-s", "2"), "--streams has no effect with --speculative"),
        (("STORE", "--speculative", "-p", "64"), "--n-prompt has no effect with --speculative"),
        (("STORE", "--speculative", "--launch-us", "5"), "--launch-us has an effect with --dry-launch only"),
        (("STORE", "--speculative", "-n", "64,128"), "--n-gen 64,128: --speculative takes one number"),
        (("STORE", "--dry-launch", "-r", "2"), "--repetitions has no effect with --dry-launch"),
        (("STORE", "--dry-launch", "-n", "2"), "--n-gen has no effect with --dry-launch"),
        (("STORE", "--launch-us", "5"), "--launch-us has an effect with --dry-launch only"),
        (("STORE", "-t", ""), "-t is followed by an empty value"),
        (("", "-m", "STORE"), "two models"),
        (("STORE", "-md", "demo-draft"), "--model-draft has an effect with --speculative only"),
    ],
)
def test_mistakes(capfd: Any, store: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = bench(capfd, *(str(store) if a == "STORE" else a for a in arguments))
    assert (code, out) == (2, "") and message in err
