"""Speculative decoding as users meet it: flags, figures, refusals, the benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from strata.config import Override, load_config
from strata.engine.bench.figures import Limits
from strata.engine.bench.speculation import ORDER, POLICIES, SpeculativeBench, SpeculativeRun, Workload
from strata.engine.speculative.ngram import NgramProposer
from strata.errors import ConfigError
from strata.hardware.profile import HardwareProfile
from strata.interfaces import speculative_bench
from strata.interfaces.bundled import model_path
from strata.interfaces.cli import strata
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.planning import plan_run
from strata.interfaces.speculation import match_vocabularies, speculation_options
from strata.interfaces.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def machine() -> HardwareProfile:
    return remembered_machine()


def configured(**options: str) -> list[Override]:
    asked = {
        "model.path": "demo",
        "backend.threads": "1",
        **{f"speculative.{key}": value for key, value in options.items()},
    }
    return [Override(option, text, "test") for option, text in asked.items()]


def answer(*flags: str) -> dict[str, object]:
    command = [
        "run",
        "demo",
        "--temp",
        "0",
        "-n",
        "40",
        "--raw",
        "--json",
        "-p",
        "one two one two one two one",
    ]
    result = CliRunner().invoke(strata, [*command, *flags])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_run_gives_the_same_text_with_every_proposer() -> None:
    """And says what drafts did, or nothing where there are none."""
    plain, ngrams, draft = answer("--no-draft"), answer("--draft", "4"), answer("-md", "demo-draft")
    assert plain["speculation"] is None
    assert plain["text"] == ngrams["text"] == draft["text"]
    for found, name in ((ngrams, "ngram"), (draft, "draft")):
        figures = found["speculation"]
        assert isinstance(figures, dict)
        assert figures["proposer"] == name
        assert figures["tokens"] >= figures["forwards"] > 0
    assert max(i for i, count in enumerate(ngrams["speculation"]["lengths"]) if count) <= 4  # type: ignore[index]


def test_a_stop_text_inside_an_accepted_run() -> None:
    """case-29: the answer ends where it ends without drafts."""
    whole = answer("--no-draft")["text"]
    assert isinstance(whole, str)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    texts = [
        answer("--stop", stop, *flags)["text"]
        for flags in (["--no-draft"], ["--draft", "8"], ["-md", "demo-draft"])
    ]
    assert texts[0] == texts[1] == texts[2] == whole[: whole.index(stop)]


def test_the_plan_has_room_for_the_draft(machine: HardwareProfile) -> None:
    """Weights and KV of the draft are parts of the host's memory, and the engine obeys them."""
    config = load_config(None, configured(draft="demo-draft"))
    plan = plan_run(model_path("demo"), config, machine, context=512, requests=2)
    assert plan.draft is not None
    parts = {part.name: part.nbytes for part in plan.host.parts}
    assert parts["draft weights"] == plan.draft.weights > 700_000
    assert parts["draft KV"] == plan.draft.nbytes
    assert plan.draft.pages == plan.kv.pages == 2 * 512 // 32
    assert sum(parts.values()) == plan.host.total
    assert plan_run(model_path("demo"), load_config(None, configured()), machine).draft is None


def respelled(change: Callable[[dict[str, int]], dict[str, int]]) -> Tokenizer:
    """The demo's tokenizer with another table of words and ids."""
    files = {path.name: path.read_bytes() for path in model_path("demo").glob("tokenizer*.json")}
    vocabulary = json.loads(files["tokenizer.json"])
    model = vocabulary["model"]
    model["vocab"] = change(model["vocab"])
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    files["tokenizer.json"] = json.dumps(vocabulary).encode()
    return Tokenizer(files, where="other")


def test_drafts_with_the_same_tokens_under_other_ids_are_mapped() -> None:
    """By their spelling; the same ids need no map."""
    demo = Tokenizer.load(model_path("demo"))
    assert match_vocabularies(demo, Tokenizer.load(model_path("demo-draft")), "demo-draft") is None
    swapped = {300: 301, 301: 300}
    other = respelled(lambda words: {word: swapped.get(i, i) for word, i in words.items()})
    ids = match_vocabularies(demo, other, "other")
    assert ids is not None
    assert ids.ids([299, 300, 301, 302]) == [299, 301, 300, 302]


def without_tokens(count: int) -> Tokenizer:
    return respelled(lambda words: {w: i for w, i in words.items() if not 1000 <= i < 1000 + count})


def test_a_draft_that_lacks_some_tokens_is_taken_and_one_that_lacks_many_is_refused() -> None:
    """Both numbers, the share that is needed, and the first token that is lacking."""
    demo = Tokenizer.load(model_path("demo"))
    ids = match_vocabularies(demo, without_tokens(600), "other")
    assert ids is not None and (ids.drafted < 0).sum() == 600
    with pytest.raises(
        ConfigError, match=r"of the model's 4096 tokens it spells 2996 .*80% are needed; .* is 1000"
    ):
        match_vocabularies(demo, without_tokens(1100), "other")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"use": "draft"}, "speculative.draft is empty"),
        ({"least": "9", "most": "4"}, "speculative.least is 9 and speculative.most 4"),
    ],
)
def test_contradictions_are_named(machine: HardwareProfile, options: dict[str, str], cause: str) -> None:
    tokenizer = Tokenizer.load(model_path("demo"))
    with pytest.raises(ConfigError, match=cause):
        speculation_options(load_config(None, configured(**options)), machine, tokenizer)


def test_off_means_off(machine: HardwareProfile) -> None:
    for options in ({"use": "off"}, {"most": "0"}):
        assert open_model(load_config(None, configured(**options)), machine).engine.speculator is None


def test_the_benchmark_compares_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy on every text; the text is the same with all. The memory's speed is not measured."""
    monkeypatch.setattr(speculative_bench, "limits_probe", lambda backend: Limits)
    command = ["bench", "demo", "--speculative", "-n", "24", "-r", "1", "--texts", "code,repeat"]
    result = CliRunner().invoke(strata, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {run["policy"] for run in found["runs"]} == {name for name, *_ in POLICIES} == set(ORDER)
    assert {run["workload"] for run in found["runs"]} == {"code edit", "repeat (scripted)"}
    assert all(sum(tokens for _, tokens in run["steps"]) == run["tokens"] for run in found["runs"])
    assert all(run["same"] for run in found["runs"])
    repeated = [run for run in found["runs"] if run["workload"].startswith("repeat")]
    assert all(run["tokens_per_forward"] > 2 for run in repeated if run["policy"].startswith("fixed"))


def test_texts_are_compared_with_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever run comes first: where that one went wrong, it is the one that is told."""
    found = iter([*("a" if name == "fixed 4" else "b" for name in ORDER)])

    def run(self: object, workload: object, policy: str, tokens: int) -> tuple[SpeculativeRun, str]:
        return SpeculativeRun("", policy, 1, 1, 0, 1, 1, 1, 0, None, True), next(found)

    monkeypatch.setattr(SpeculativeBench, "_run", run)
    bench = SpeculativeBench(None, NgramProposer(), lambda rows, **at: 1.0, Limits)  # type: ignore[arg-type]
    runs = list(bench.runs(Workload("", [1]), 1, 1))
    assert {run.policy: run.same for run in runs} == {name: name != "fixed 4" for name in ORDER}


def test_texts_that_there_are_not_are_named() -> None:
    result = CliRunner().invoke(strata, ["bench", "demo", "--speculative", "--texts", "code,poem"])
    assert "'poem', there are code edit, JSON, prose, repeat" in str(result.exception)
    result = CliRunner().invoke(strata, ["bench", "demo", "--texts", "code"])
    assert "--texts has an effect with --speculative only" in str(result.exception)


def test_the_slowest_steps_in_a_row() -> None:
    """Of 2 steps: a token in 1.1 + 1.9 seconds, 3 in the fastest."""
    steps = [(1.0, 1), (0.1, 1), (1.9, 1), (1.1, 0), (0.5, 2)]
    run = SpeculativeRun("", "", 5, 4.6, 0, 1, 1, 1, 0, None, True, steps)
    assert run.slowest(2) == pytest.approx(1 / 3.0)
    assert run.slowest(5) == pytest.approx(5 / 4.6) and run.slowest(6) is None
