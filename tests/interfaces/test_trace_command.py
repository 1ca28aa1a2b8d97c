"""`strata trace`: replay and import, and what goes wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from strata.interfaces.cli import run

HEAD = "trace,seq,layer,step,experts\n"


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    rows = [f"one,0,0,{step},{step % 4};{step % 3 + 4}\n" for step in range(40)]
    rows += [f"two,0,{layer},{step},{step % 2}\n" for step in range(10) for layer in (0, 1)]
    path = tmp_path / "routes.csv.gz"
    path.write_bytes(gzip.compress((HEAD + "".join(rows)).encode()))
    return path


def test_every_policy_stands_beside_the_bound(routes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "replay", str(routes), "--only", "one", "--slots", "50%,6"]) == 0
    out = capsys.readouterr().out
    assert "one: 7 experts in 1 layers" in out
    rows = [line.split() for line in out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["3"] * 4 + ["6"] * 4
    assert [row[2] for row in rows] == ["lru", "lfu", "forecast", "belady"] * 2
    assert all(row[4] == "100.0%" for row in rows if row[2] == "belady")


def test_json_has_every_trace(routes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "replay", str(routes), "--policy", "lru", "--slots", "2", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["trace"] for report in reports] == ["one", "two"]
    assert [row["policy"] for row in reports[1]["results"]] == ["lru", "belady"]
    assert reports[1]["layers"] == 2
    assert reports[1]["results"][0]["accesses"] == 20


def test_an_imported_trace_replays_alike(
    routes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "import", str(routes), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    arguments = ["--slots", "50%", "--json"]
    assert run(["trace", "replay", str(tmp_path / "out/one.trace"), *arguments]) == 0
    imported = json.loads(capsys.readouterr().out)
    assert run(["trace", "replay", str(routes), "--only", "one", *arguments]) == 0
    assert imported == json.loads(capsys.readouterr().out)
    assert run(["trace", "import", str(routes), "--out", str(tmp_path / "out")]) == 1, "never overwritten"


def test_the_plot_is_an_svg_with_a_line_per_policy(routes: Path, tmp_path: Path) -> None:
    plot = tmp_path / "hits.svg"
    arguments = ["trace", "replay", str(routes), "--only", "one", "--slots", "2,4,6", "--plot", str(plot)]
    assert run(arguments) == 0
    lines = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)


def test_a_name_cannot_break_the_plot(tmp_path: Path) -> None:
    path, plot = tmp_path / "routes.csv", tmp_path / "hits.svg"
    path.write_text(HEAD + "</text><script>&,0,0,0,1\n")
    assert run(["trace", "replay", str(path), "--slots", "1", "--plot", str(plot)]) == 0
    assert "<script>" not in plot.read_text()
    ElementTree.parse(plot)


def test_a_torn_recording_is_replayed_and_told(
    routes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["trace", "import", str(routes), "--out", str(tmp_path)])
    path = tmp_path / "one.trace"
    path.write_bytes(path.read_bytes()[:-5])
    capsys.readouterr()
    assert run(["trace", "replay", str(path), "--slots", "3"]) == 0
    seen = capsys.readouterr()
    assert "is cut off" in seen.err
    assert "80 accesses" in seen.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--slots", "150%"], 2, "shares up to 100%"),
        (["--slots", "some"], 2, "slots are numbers"),
        (["--slots", "50%,8"], 2, "--slots 8, one has 7 experts"),
        (["--policy", "best"], 2, "no policy is called 'best'"),
        (["--only", "three"], 2, "it has one, two"),
        (["--plot", "x.svg"], 2, "choose one with --only"),
        (["--inserts", "-1"], 2, "--inserts"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    routes: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(["trace", "replay", str(routes), *arguments]) == code
    assert message in capsys.readouterr().err


def test_there_is_nothing_to_choose_from_a_recorded_trace(
    routes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "import", str(routes), "--out", str(tmp_path)]) == 0
    assert run(["trace", "replay", str(tmp_path / "one.trace"), "--only", "two"]) == 2
    assert "one.trace holds one trace" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"STRATRC1", b"STRATRC1" + bytes(40), b"GGUF", b"\x1f\x8b\x00"])
def test_what_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "odd"
    path.write_bytes(content)
    assert run(["trace", "replay", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_debug_may_stand_behind_a_subcommand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "replay", str(tmp_path / "absent"), "--debug"]) == 1
    assert "absent" in capsys.readouterr().err
