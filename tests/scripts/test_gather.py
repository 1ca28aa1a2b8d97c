"""A table of scripts/compare_peers.py that grows pair by pair. Nothing is measured here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_peers
from peers import measure
from peers.figures import Pair, Sample
from peers.gather import Table, begun
from peers.measure import Load, Model, Runner, kernels_version
from peers.report import Row, markdown, merged, to_json
from peers.workloads import LLAMA, Peer, Workload, workloads

from strata.errors import UsageError

PEER = Peer(LLAMA, "avx2", Path("/b/llama-bench"), Path("/b/llama-batched-bench"))
CANDIDATES = [(PEER, work) for work in workloads(32)[:3]]


def pair(version: str) -> Pair:
    return Pair(Sample(10.0, 2e9, 2e9), Sample(20.0, 2e9, 2e9, 0.5), version)


def gather(file: Path, version: str) -> str:
    """One call's worth; the row it chose."""
    table = Table.read(file)
    peer, work = table.next(CANDIDATES, version)
    with begun(file, table, (peer, work), version):
        table.add(peer, work, pair(version), ["a note"])
    return work.label


def test_rows_take_turns_and_new_kernels_begin_anew(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    labels = [work.label for _, work in CANDIDATES]
    assert [gather(file, "a") for _ in range(4)] == [*labels, labels[0]]
    table = Table.read(file)
    assert [(row.work.label, len(row.pairs)) for row in table.rows] == list(
        zip(labels, (2, 1, 1), strict=True)
    )
    assert table.notes == ["a note"]
    assert [gather(file, "b") for _ in range(2)] == labels[:2]
    kept = {row.work.label: [one.version for one in row.pairs] for row in Table.read(file).rows}
    assert kept == dict(zip(labels, (["b"], ["b"], ["a"]), strict=True))


def test_pairs_of_older_kernels_leave_a_row_when_newer_ones_come() -> None:
    first, second = workloads(64)[:2]
    old, new = pair("old"), pair("new")
    documents = [to_json([Row(PEER, first, (old, new)), Row(PEER, second, (old,))], [])]
    rows, _ = merged(json.loads(json.dumps(documents)))
    assert [row.pairs for row in rows] == [(new,), (old,)]
    text = markdown(rows, [])
    assert "- Strata's kernels new: llama.cpp avx2 moe prefill 512\n" in text
    assert "- Strata's kernels old: llama.cpp avx2 moe prefill 2048\n" in text
    assert "- Strata's kernels: new\n" in markdown(rows[:1], [])


def test_a_row_that_fails_is_not_chosen_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    table = Table.read(file)
    with pytest.raises(KeyboardInterrupt), begun(file, table, CANDIDATES[0], "a"):
        raise KeyboardInterrupt
    assert Table.read(file).rows == []
    assert gather(file, "a") == CANDIDATES[1][1].label


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UsageError, match="no table"):
        Table.read(file)
    assert file.read_text() == "mine"


def test_append_measures_as_many_pairs_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def measured(self: Runner, peer: Peer, work: Workload, model: Model) -> Pair:
        ran.append(work.label)
        return pair(kernels_version())

    monkeypatch.setattr(Runner, "pair", measured)
    file = str(tmp_path / "all.json")
    options = compare_peers.parse(["--work", "w", "--append", file, "--pairs", "2"])
    model = Model(Path("m.gguf"), Path("m.store"))
    assert compare_peers.append(options, Runner(1, 1), CANDIDATES, {"moe": model}, ["a note"]) == 0
    assert ran == [work.label for _, work in CANDIDATES[:2]]
    assert len(Table.read(options.append).rows) == 2


def test_pairs_that_other_processes_disturbed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = pair("a")
    loud = replace(quiet, ours=replace(quiet.ours, others=0.5))
    pairs = iter([loud, quiet])
    monkeypatch.setattr(Runner, "pair", lambda *_: next(pairs))
    options = compare_peers.parse(["--work", "w", "--append", str(tmp_path / "all.json"), "--pairs", "2"])
    model = Model(Path("m.gguf"), Path("m.store"))
    compare_peers.append(options, Runner(1, 1), CANDIDATES, {"moe": model}, [])
    (row,) = Table.read(options.append).rows
    assert (row.work, row.pairs) == (CANDIDATES[1][1], (quiet,))


def test_what_others_had_is_what_this_process_and_its_children_had_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"monotonic": 10.0, "all": 100.0, "mine": 5.0}
    monkeypatch.setattr("peers.measure.time.monotonic", lambda: clock["monotonic"])
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: clock["all"])
    monkeypatch.setattr(measure, "_own_cpu_seconds", lambda: clock["mine"])
    load = Load()
    clock.update(monotonic=14.0, all=109.0, mine=13.0)
    assert load.of_others() == 0.25
    clock.update(all=108.9, mine=13.0)  # ticks are coarse
    assert load.of_others() == pytest.approx(0.225)
    clock.update(all=107.9)
    assert load.of_others() == 0.0


def test_rows_are_chosen_by_several_names_in_that_order() -> None:
    chosen = compare_peers.choose(workloads(32), "smollm2,moe decode x 4")
    assert [work.label for work in chosen] == [
        *(work.label for work in workloads(32) if work.model == "smollm2"),
        "moe decode x 4",
    ]
    assert compare_peers.choose(workloads(32), "") == workloads(32)
    with pytest.raises(UsageError, match="'decode x 5'"):
        compare_peers.choose(workloads(32), "moe,decode x 5")
