"""--timeline and --record-trace: whole files, also after Ctrl-C, that say what really ran."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import finish, start

from strata.config import load_config
from strata.core import Request, SamplingParams
from strata.engine.bench.figures import Limits
from strata.engine.engine import Engine, Event
from strata.engine.load import load_engine
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.planning import plan_run
from strata.interfaces.recording import Files, recording
from strata.memory.trace import TraceFile
from strata.memory.trace_format import Outcome

FIXED = ("--temp", "0", "--ignore-eos", "-n", "6")


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Complete events by lane."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_a_run_as_a_timeline(strata: Any, store: Path, tmp_path: Path) -> None:
    """Every step has its layers inside it, and every layer its ops; ops of a socket follow each other."""
    path = tmp_path / "run.json"
    assert strata("run", store, "-p", "hello there", *FIXED, "--timeline", path).code == 0
    lanes = spans(path)
    assert set(lanes) == {"host", "layers", "socket 0"}
    steps = [span for span in lanes["host"] if span["name"] != "sample"]
    assert steps[0]["name"].startswith("prefill") and {s["name"] for s in steps[1:]} == {"decode 1"}
    assert len(steps) == 6 and [step["args"]["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    layers = 2
    assert len(lanes["layers"]) == layers * len(steps)
    for layer in lanes["layers"]:
        assert any(_inside(layer, step) for step in steps)
        inner = [op for op in lanes["socket 0"] if _inside(op, layer)]
        assert {"linear", "attention", "experts", "rms_norm"} <= {op["name"] for op in inner}
        assert {op["args"]["layer"] for op in inner} == {int(layer["name"].split()[1])}
    ops = lanes["socket 0"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in itertools.pairwise(ops))
    assert all(op["args"]["bytes"] > 0 for op in ops if op["name"] == "experts")


def _inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return (
        outer["ts"] <= inner["ts"] + 0.002
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002
    )


def test_what_comes_from_the_disk_has_a_lane(store: Path, tmp_path: Path) -> None:
    """A model larger than its memory: reads of each step, with their bytes."""
    path = tmp_path / "disk.json"
    plan = plan_run(store, load_config(None, []), remembered_machine())
    small = dataclasses.replace(plan, host=dataclasses.replace(plan.host, in_memory=4, disk_bytes=1))
    engine = load_engine(store, small)
    with recording(engine, small, Files(path)):
        list(engine.generate(Request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6))))
    lanes = spans(path)
    assert lanes["disk"] and all(span["args"]["bytes"] > 0 for span in lanes["disk"])
    steps = [span for span in lanes["host"] if span["name"] != "sample"]
    assert all(any(_inside(read, step) for step in steps) for read in lanes["disk"])


def test_a_benchmark_as_a_timeline(strata: Any, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    quick = ("-p", "4", "-n", "2", "-d", "0", "-s", "2", "-r", "1", "-t", "2")
    assert strata("bench", store, *quick, "--timeline", path).code == 0
    names = [span["name"] for span in spans(path)["host"]]
    assert "prefill 4" in names and names.count("decode 2") >= 2


def test_a_recorded_run_can_be_replayed(strata: Any, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "night.trace"
    first = strata("run", store, "-p", "hello there", *FIXED, "--record-trace", path)
    assert first.code == 0
    trace = TraceFile(path)
    accesses = list(trace)
    assert not trace.torn and trace.header.model == "tiny-moe" and min(trace.header.expert_bytes) > 0
    decode = [access for access in accesses if not access.prefill]
    assert len(accesses) == 6 * 2 and len(decode) == 5 * 2  # six steps of two layers, the first of the prompt
    assert {access.sequence for access in accesses} == {1}
    assert [access.step for access in decode] == [step for step in range(1, 6) for _ in range(2)]
    for access in accesses:
        assert set(access.outcomes) == {Outcome.CPU} and set(access.bytes) == {0}
        assert len(access.experts) == 2 * access.tokens or access.prefill
    replayed = strata("trace", "replay", path, "--slots", "50%", "--json")
    assert replayed.code == 0
    (report,) = json.loads(replayed.out)
    used = sum(len(access.experts) for access in decode)
    assert {result["accesses"] for result in report["results"]} == {used}
    again = strata("run", store, "-p", "hello there", *FIXED, "--record-trace", path)
    assert again.code == 1 and f"{path}: File exists, and recordings are not overwritten" in again.err


def test_a_recording_says_what_became_of_each_expert(strata: Any, store: Path, tmp_path: Path) -> None:
    """On a device with few slots some experts hit, others are fetched or left to the CPU, as told."""
    few = ("--set", "device.use=emulated", "--set", "device.reserve=1GiB", "--set", "experts.slots=5")
    for mode, other, never in (("fetch", Outcome.FETCH, Outcome.CPU), ("cpu", Outcome.CPU, None)):
        path = tmp_path / f"{mode}.trace"
        options = (*few, "--set", f"experts.misses={mode}", "--record-trace", path)
        assert strata("run", store, "-p", "hello there", *FIXED, *options).code == 0
        trace = TraceFile(path)
        size = trace.header.expert_bytes
        decode = [access for access in trace if not access.prefill]
        outcomes = {outcome for access in decode for outcome in access.outcomes}
        assert {Outcome.HIT, other} <= outcomes and never not in outcomes
        for access in decode:
            for outcome, moved in zip(access.outcomes, access.bytes, strict=True):
                assert moved >= size[access.layer] if outcome is Outcome.FETCH else moved == 0


def test_ctrl_c_leaves_whole_files(store: Path, tmp_path: Path) -> None:
    timeline, trace = tmp_path / "t.json", tmp_path / "t.trace"
    process = start(
        "run", store, "--raw", "-p", "hello", "--ignore-eos", "--timeline", timeline, "--record-trace", trace,
        "-c", "256", "--temp", "0",
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code in (0, 130)
    assert spans(timeline)["host"]
    recorded = TraceFile(trace)
    assert list(recorded) and not recorded.torn


def test_a_benchmark_that_is_stopped_leaves_a_whole_file(
    strata: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, itertools.count()

    def interrupted(engine: Engine) -> list[Event]:
        if next(steps) == 20:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr("strata.interfaces.benchmark.limits_probe", lambda backend: Limits)
    timeline = tmp_path / "t.json"
    done = strata("bench", store, "-p", "8", "-n", "0", "-r", "30", "--no-warmup", "--timeline", timeline)
    assert done.code == 130
    assert len([span for span in spans(timeline)["host"] if span["name"] == "prefill 8"]) == 20
    assert list(tmp_path.iterdir()) == [timeline]


def test_an_emulated_device_as_a_timeline(strata: Any, store: Path, tmp_path: Path) -> None:
    """Its own lanes, in virtual time, with the steps beside them."""
    path = tmp_path / "run.json"
    emulated = ("--set", "device.use=emulated", "--set", "device.reserve=1GiB")
    assert strata("run", store, "-p", "hello there", *FIXED, *emulated, "--timeline", path).code == 0
    lanes = spans(path)
    assert {"compute", "h2d", "d2h", "steps"} <= set(lanes)
    assert [step["name"] for step in lanes["steps"]][1:] == ["decode 1"] * 5
    end = max(step["ts"] + step["dur"] for step in lanes["steps"])
    assert all(span["ts"] + span["dur"] <= end + 0.002 for span in lanes["compute"])


@pytest.mark.parametrize("option", ["--timeline", "--record-trace"])
def test_a_file_that_cannot_be_written_stops_before_anything_runs(
    strata: Any, store: Path, option: str
) -> None:
    done = strata("run", store, "-p", "hello", *FIXED, option, "/nowhere/file")
    assert done.code == 1 and "/nowhere/" in done.err and done.out == ""


def test_files_that_cannot_both_be_written_leave_none(strata: Any, store: Path, tmp_path: Path) -> None:
    trace, timeline = tmp_path / "a.trace", tmp_path / "a.json"
    run = ("run", store, "-p", "hello", *FIXED)
    assert strata(*run, "--record-trace", trace, "--timeline", tmp_path / "no" / "a.json").code == 1
    same = strata(*run, "--record-trace", trace, "--timeline", trace)
    assert same.code == 2 and "is named for both" in same.err
    assert not any(tmp_path.iterdir())
    trace.touch()
    assert strata(*run, "--record-trace", trace, "--timeline", timeline).code == 1
    assert list(tmp_path.iterdir()) == [trace] and trace.stat().st_size == 0


def test_a_full_disk_under_one_file_leaves_the_other_whole(store: Path, tmp_path: Path) -> None:
    plan = plan_run(store, load_config(None, []), remembered_machine())
    engine = load_engine(store, plan)
    timeline, trace = tmp_path / "gone" / "a.json", tmp_path / "a.trace"
    timeline.parent.mkdir()
    with pytest.raises(FileNotFoundError), recording(engine, plan, Files(timeline, trace)):
        list(engine.generate(Request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))))
        timeline.unlink()
        timeline.parent.rmdir()
    recorded = TraceFile(trace)
    assert list(recorded) and not recorded.torn


@pytest.mark.parametrize("use", ["none", "emulated"])
def test_who_reads_a_pipe_gets_one_timeline(strata: Any, store: Path, tmp_path: Path, use: str) -> None:
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    device = ("--set", f"device.use={use}", "--set", "device.reserve=1GiB")
    assert strata("run", store, "-p", "hello", *FIXED, *device, "--timeline", pipe).code == 0
    reader.join(timeout=10)
    (text,) = found
    assert any(event["name"] == "decode 1" for event in json.loads(text)["traceEvents"])
