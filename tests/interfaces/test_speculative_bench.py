"""`strata bench --speculative`: who takes turns, what is compared, what the table says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from strata.config import Config, Override, load_config
from strata.core import Request
from strata.engine.bench import speculation
from strata.engine.bench.figures import Limits
from strata.engine.bench.speculation import POLICIES, SpeculativeBench, SpeculativeRun, Workload
from strata.engine.bench.turns import Decoding, Step
from strata.engine.engine import Engine
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.proposer import Ask, Proposal
from strata.errors import CapacityError
from strata.interfaces import speculative_bench
from strata.interfaces.cli import strata
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.speculative_bench import SpeculativeBenchmark
from strata.plan.plan import Plan


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's speed takes seconds."""
    monkeypatch.setattr(speculative_bench, "limits_probe", lambda backend: Limits)


def demo(draft: str = "", **options: str) -> Config:
    asked = {"model.path": "demo", "backend.threads": "1", **options}
    asked |= {"speculative.draft": draft} if draft else {}
    return load_config(None, [Override(option, text, "test") for option, text in asked.items()])


def test_the_benchmark_compares_equal_texts() -> None:
    """Every policy on every text; the text is the same with all."""
    command = ["bench", "demo", "--speculative", "-n", "24", "-r", "1", "--texts", "code,repeat"]
    result = CliRunner().invoke(strata, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["in_turns"] and all(run["in_turns"] for run in found["runs"])
    assert {run["policy"] for run in found["runs"]} == {name for name, *_ in POLICIES}
    assert {run["workload"] for run in found["runs"]} == {"code edit", "repeat (scripted)"}
    for run in found["runs"]:
        assert sum(tokens for _, tokens, *_ in run["steps"]) == run["tokens"]
        assert sum(rows - 1 for *_, rows, _ in run["steps"]) == sum(run["proposed_by"].values())
        assert not any(drafting for *_, drafting in run["steps"])  # n-grams are free
        assert 0 < run["undisturbed_seconds"] <= run["seconds"] * 1.000001
    assert all(run["same"] for run in found["runs"])
    assert all(set(run["proposed_by"]) == {"ngram"} for run in found["runs"] if run["policy"] == "fixed 8")
    repeated = [run for run in found["runs"] if run["workload"].startswith("repeat")]
    assert all(run["tokens_per_forward"] > 2 for run in repeated if run["policy"].startswith("fixed"))


def a_run(
    policy: str,
    seconds: Sequence[float] = (1.0,) * 8,
    proposed: int = 0,
    in_turns: bool = True,
    times: Sequence[float] = (),
) -> SpeculativeRun:
    """A token a step."""
    by = {"ngram": proposed} if proposed else {}
    steps, total = [Step(each, 1) for each in seconds], sum(seconds)
    return SpeculativeRun(
        "t", policy, len(steps), total, 0, 1, 1, 1, 0, None, True, steps, by, in_turns, times or seconds
    )


def test_the_table_says_who_proposed_and_what_one_round_is_worth() -> None:
    """No spread and no error of one round; proposed tokens by proposer, of all rounds."""
    runs = [a_run(name, proposed=0 if "plain" in name else 5) for name, *_ in POLICIES]
    columns = [cell.strip() for cell in speculative_bench.markdown_head().splitlines()[0].split("|")]
    spread, ratio, by, accepted = (
        columns.index(name) for name in ("spread", "of plain", "proposed by", "accepted")
    )
    for found, shown, tokens in (
        (runs, ("-", "1.000"), "ngram 5"),
        (runs * 2, ("1.00-1.00", "1.000 ± 0.000"), "ngram 10"),
    ):
        rows = [[c.strip() for c in line.split("|")] for line in speculative_bench.markdown_lines(found)]
        assert all(len(row) == len(columns) for row in rows)
        assert {(row[spread], row[ratio]) for row in rows} == {shown}
        assert [row[by] for row in rows] == ["-", "-", *[tokens] * 4]
        assert [row[accepted] for row in rows] == ["-", "-", *["100 %"] * 4]
    assert "no standard error" in speculative_bench.remark(1)
    assert "no standard error" not in speculative_bench.remark(3)
    assert "one after the other, because of rain" in speculative_bench.remark(3, "of rain")


def test_acceptance_is_that_of_rounds_with_drafts() -> None:
    """Where nothing was proposed nothing was wrong."""
    idle = [replace(a_run(name), acceptance=0.0) for name, *_ in POLICIES]
    drafted = [replace(run, acceptance=0.5, proposed_by={"ngram": 5}) for run in idle]
    for runs, shown in ((idle, "-"), (idle + drafted, "50 %")):
        lines = speculative_bench.markdown_lines(runs)
        assert {line.split("|")[9].strip() for line in lines} == {shown}


def test_speeds_are_compared_by_the_time_of_all_rounds() -> None:
    """2 + 4 seconds by 1 + 4; the error is that of the ratio of two means."""
    seconds = {"plain": (2.0, 4.0), "fixed 4": (1.0, 4.0)}
    runs = [a_run(name, [seconds[name][turn]]) for turn in range(2) for name in seconds]
    found = speculative_bench.compare(runs, "fixed 4")
    assert found.total == pytest.approx(6 / 5) and found.rounds == pytest.approx([2.0, 1.0])
    assert found.error == pytest.approx((2 * 0.8**2 / 2) ** 0.5 / 2.5)
    assert speculative_bench.compare(runs[:2], "fixed 4").error is None


def test_disturbances_are_left_out_where_it_says_so() -> None:
    """Not by the clock; who took no turns has no such figure."""
    runs = [a_run(name, [1.0, 7.0], times=[1.0, 1.0]) for name, *_ in POLICIES]
    runs[0] = a_run("plain", [1.0, 1.0])
    assert speculative_bench.compare(runs, "fixed 4").total == pytest.approx(2 / 8)
    assert speculative_bench.compare(runs, "fixed 4", cut=True).total == pytest.approx(1.0)
    columns = [cell.strip() for cell in speculative_bench.markdown_head().splitlines()[0].split("|")]
    for turns, shown in ((True, "1.000"), (False, "-")):
        lines = speculative_bench.markdown_lines([replace(run, in_turns=turns) for run in runs])
        assert {line.split("|")[columns.index("undisturbed")].strip() for line in lines} == {shown}


@pytest.mark.parametrize("in_turns", [True, False])
def test_texts_are_compared_with_plain_decodings(in_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever goes wrong, it is the one that is told."""
    count = iter(range(2 * len(POLICIES)))  # the first round is not counted
    wrong = len(POLICIES) + 3

    class Script(speculation.ScriptedTokens):
        def __init__(self, valid_tokens: int, prompt: int, script: Sequence[int], *told: None) -> None:
            super().__init__(valid_tokens, prompt, script if next(count) != wrong else script[::-1], *told)

    monkeypatch.setattr(speculation, "ScriptedTokens", Script)
    engine = open_model(demo(), remembered_machine()).engine
    bench = SpeculativeBench(engine, NgramProposer(), lambda rows, **at: 1.0, Limits, in_turns=in_turns)
    runs = list(bench.runs(Workload("", [1, 2, 3], list(range(9))), 9, 1))
    assert [run.policy for run in runs] == [name for name, *_ in POLICIES]
    assert [run.same for run in runs].count(False) == 1
    assert {(run.tokens, run.in_turns) for run in runs} == {(8, in_turns)}


def test_policies_share_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds pages of running requests only, of several at once, and changes no text."""
    running: list[Request] = []
    held = []
    begin, propose = Decoding.__init__, DraftModel.propose

    def begun(self: Decoding, engine: Engine, request: Request, *rest: Any) -> None:
        running.append(request)
        begin(self, engine, request, *rest)

    def proposed(self: DraftModel, asks: Sequence[Ask]) -> list[Proposal]:
        ids = {request.request_id for request in running if request.finish_reason is None}
        self.check_integrity(ids)
        found = propose(self, asks)
        held.append(sum(name in self._texts for name in ids))
        return found

    monkeypatch.setattr(Decoding, "__init__", begun)
    monkeypatch.setattr(DraftModel, "propose", proposed)
    bench = SpeculativeBenchmark(demo(draft="demo-draft"), 24, ["repeat"])
    assert bench.plan.draft is not None and bench.plan.draft.pages == bench.plan.kv.pages
    (runs,) = bench.results(2)
    assert all(run.same for run in runs)
    drafting = {run.policy for run in runs if sum(step.drafting for step in run.steps) > 0}
    assert drafting >= {name for name, lengths, costs in POLICIES if lengths is not None and not costs}
    assert max(held) >= 3 and len({request.request_id for request in running}) == 3 * len(POLICIES)


@pytest.mark.parametrize(("use", "why"), [("emulated", "a device's memory"), ("none", "no room for 6 KV")])
def test_without_room_for_all_caches_policies_run_one_after_the_other(
    use: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = speculative_bench.plan_run

    def small(*at: Any, requests: int, **options: Any) -> Plan:
        if requests > 1:
            raise CapacityError("too small", remedy="")
        return plan(*at, requests=requests, **options)

    monkeypatch.setattr(speculative_bench, "plan_run", small)
    bench = SpeculativeBenchmark(demo(**{"device.use": use}), 6, ["repeat"])
    assert why in bench.alone and why in speculative_bench.remark(1, bench.alone)
    (runs,) = bench.results(1)
    assert [run.policy for run in runs] == [name for name, *_ in POLICIES]
    assert not any(run.in_turns for run in runs) and all(run.same for run in runs)


def test_texts_that_there_are_not_are_named() -> None:
    result = CliRunner().invoke(strata, ["bench", "demo", "--speculative", "--texts", "code,poem"])
    assert "'poem'" in str(result.exception)
    assert "remedy: choose from code edit, JSON, prose, repeat" in str(result.exception)
    result = CliRunner().invoke(strata, ["bench", "demo", "--texts", "code"])
    assert "--texts has an effect with --speculative only" in str(result.exception)


def test_the_slowest_steps_in_a_row() -> None:
    """Of 2 steps: by plain's mean speed, or in turns by its time for the same tokens."""
    mine, other = [1.0, 1.2, 1.3, 1.1, 1.0], [1.0, 0.9, 1.2, 1.0, 0.9]
    plain = a_run("plain", other)
    alone = a_run("", mine, in_turns=False)
    assert alone.slowest(plain, 2) == pytest.approx(2.0 / 2.5)
    assert alone.slowest(plain, 5) == pytest.approx(5.0 / 5.6) and alone.slowest(plain, 6) is None
    beside = a_run("", mine)
    assert beside.slowest(plain, 2) == pytest.approx(2.1 / 2.5)
    assert plain.slowest(plain, 2) == pytest.approx(1.0)
    shaken = a_run("", [*mine[:2], 100.0, *mine[3:]], times=mine)
    assert shaken.slowest(plain, 2) == pytest.approx(2.1 / 2.5)


def test_a_draft_models_guesses_may_be_scripted() -> None:
    """The token of each place, as sure as it was said to be, whatever was computed."""
    guesses = [(5, 0.9), (3, 0.2)]
    sampler = speculation.ScriptedTokens(40, 2, [1, 2], guesses)
    for place, (token, chance) in enumerate(guesses):
        logits = np.arange(40, dtype=np.float32)
        assert sampler.guess(logits, [0] * (2 + place), 0.0) == token
        assert np.exp(logits[token]) / np.exp(logits).sum() == pytest.approx(chance)
