"""`strata simulate` as scripts and people see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

XEON = ("--hardware", "rtx3090-2x-e5-2680v4")
QUICK = ("--prompt", "16", "--answer", "6", "--requests", "1,2")


def test_a_config_alone_suffices(strata: Any, checkpoint: Path) -> None:
    done = strata("simulate", "--model", checkpoint / "config.json", *XEON, *QUICK, "--json")
    assert done.code == 0 and done.err == ""
    found = json.loads(done.out)
    assert [entry["requests"] for entry in found] == [1, 2]
    for entry in found:
        served = entry["served"]
        assert served["rate"] > 0 and served["decode_rate"] > served["rate"]
        assert entry["plan"]["kv"]["requests"] == entry["requests"]
        assert 0.5 < served["decode_rate"] / entry["predicted"]["tokens_per_second"] < 2
        assert served["bottleneck"] in served["busy"]


def test_it_is_readable(strata: Any, checkpoint: Path) -> None:
    done = strata("simulate", checkpoint, *XEON, *QUICK, "--set", "kv.tier=host", "--policy", "forecast")
    assert done.code == 0
    for text in (
        "tiny-moe on RTX 3090",
        "KV pages on the host",
        "policy forecast",
        "fitted to",
        "Nothing here was",
    ):
        assert text in done.out, text
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_a_recorded_trace_is_what_the_routers_do(strata: Any, store: Path, tmp_path: Path) -> None:
    """From a run to its replay on another machine."""
    trace = tmp_path / "run.trace"
    quick = ("--temp", "0", "--ignore-eos", "-n", "8", "--record-trace", trace, "-p")
    assert strata("run", store, *quick, "hello there", "--set", "speculative.use=off").code == 0
    done = strata("simulate", store, *XEON, *QUICK, "--trace", trace, "--json")
    assert done.code == 0
    assert json.loads(done.out)[0]["routes"] == "trace of tiny-moe, 7 tokens"


def test_steps_that_verified_drafts_are_left_out_and_counted(
    strata: Any, store: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    quick = ("--temp", "0", "--ignore-eos", "-n", "40", "--record-trace", trace, "-p")
    fixed = ("--set", "speculative.costs=false")
    assert strata("run", store, *quick, "hello there hello there hello there", *fixed).code == 0
    done = strata("simulate", store, *XEON, *QUICK, "--trace", trace, "--json")
    assert done.code == 0
    assert "steps of several tokens, left out: " in json.loads(done.out)[0]["routes"]


def test_a_timeline_of_what_was_simulated(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "simulated.json"
    slots = ("--set", "experts.slots=4", "--set", "kv.tier=host", "--set", "experts.misses=cpu")
    assert strata("simulate", checkpoint, *XEON, *QUICK, *slots, "--timeline", path).code == 0
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"host", "compute", "h2d", "d2h", "socket 0", "socket 1"} <= lanes


def test_the_three_rounds(strata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from strata.engine.simulate import rounds, rounds_words

    for module in (rounds, rounds_words):
        monkeypatch.setattr(module, "ASSUMED", dataclasses.replace(rounds.ASSUMED, answer=4))
        monkeypatch.setattr(module, "STATED", dataclasses.replace(rounds.STATED, cap=3))
    done = strata("simulate", "--rounds")
    assert done.code == 0
    for text in ("theirs", "40", "72", "108", "BF16, no cache", "stated:", "assumed:", "tokens/s"):
        assert text in done.out, text
    found = json.loads(strata("simulate", "--rounds", "--json").out)
    assert [entry["theirs"]["rate"] for entry in found["rounds"]] == [40, 72, 108]
    assert all(entry["explanation"] for entry in found["rounds"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "no model is given"),
        (("M", "--model", "M"), 2, "two models"),
        (("M", *XEON, "--policy", "best"), 2, "no policy is called 'best'"),
        (("M", *XEON, "--prompt", "9999"), 2, "the context holds"),
        (("M", *XEON, "--trace", "/nowhere"), 1, "/nowhere"),
        (("M", *XEON, "--only", "one"), 2, "--only chooses among the traces of --trace"),
        (("M", *XEON, "--trace", "x", "--seed", "1"), 2, "--seed is of made-up routes"),
        (("M", "--hardware", "x"), 2, "no profile of that name"),
        (("M", "--rounds"), 2, "leave MODEL out"),
        (("--rounds", "--timeline", "x.json"), 2, "leave --timeline out"),
        (("--rounds", "--set", "experts.slots=8"), 2, "leave --set out"),
        (("--rounds", "--prompt", "512"), 2, "leave --prompt out"),
        (("--rounds", "--hardware", "/nowhere"), 2, "no such file"),
    ],
)
def test_what_cannot_be_simulated(
    strata: Any, checkpoint: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = strata("simulate", *(str(checkpoint) if word == "M" else word for word in arguments))
    assert done.code == code and done.out == "" and text in done.err, done.err
