"""Speculative decoding as users meet it: flags, figures, refusals, the benchmark."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from strata.config import Override, load_config
from strata.engine.bench.figures import Limits
from strata.engine.bench.speculation import POLICIES
from strata.errors import ConfigError
from strata.hardware.profile import HardwareProfile
from strata.interfaces import speculative_bench
from strata.interfaces.bundled import model_path
from strata.interfaces.cli import strata
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.planning import plan_run
from strata.interfaces.speculation import check_vocabularies, speculation_options
from strata.interfaces.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def machine() -> HardwareProfile:
    return remembered_machine()


def configured(**options: str) -> list[Override]:
    asked = {"model.path": "demo", **{f"speculative.{key}": value for key, value in options.items()}}
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


def test_a_draft_with_another_tokenizer_is_refused() -> None:
    """Both numbers, and the first id that differs."""
    demo = Tokenizer.load(model_path("demo"))
    check_vocabularies(demo, Tokenizer.load(model_path("demo-draft")), "demo-draft")
    files = {path.name: path.read_bytes() for path in model_path("demo").glob("tokenizer*.json")}
    vocabulary = json.loads(files["tokenizer.json"])
    words = vocabulary["model"]["vocab"]
    first, second = (next(word for word, index in words.items() if index == wanted) for wanted in (300, 301))
    words[first], words[second] = 301, 300
    files["tokenizer.json"] = json.dumps(vocabulary).encode()
    with pytest.raises(
        ConfigError, match=r"2 of the model's 4096 ids differ \(it has 4096\); the first is 300"
    ):
        check_vocabularies(demo, Tokenizer(files, where="other"), "other")


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
    result = CliRunner().invoke(strata, ["bench", "demo", "--speculative", "-n", "24", "-r", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {run["policy"] for run in found["runs"]} == {name for name, *_ in POLICIES}
    assert all(run["same"] for run in found["runs"])
    repeated = [run for run in found["runs"] if run["workload"].startswith("repeat")]
    assert all(run["tokens_per_forward"] > 2 for run in repeated if run["policy"].startswith("fixed"))
