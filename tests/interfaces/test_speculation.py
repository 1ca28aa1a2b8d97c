"""Speculative decoding as users meet it: flags, figures, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from told_drafts import Told

from strata.config import Override, load_config
from strata.core import Request, SamplingParams
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.figures import SpeculationFigures
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.speculator import Speculator
from strata.errors import ConfigError
from strata.hardware.profile import HardwareProfile
from strata.interfaces import start
from strata.interfaces.bundled import model_path
from strata.interfaces.cli import strata
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.planning import plan_model, plan_run
from strata.interfaces.speculation import match_vocabularies, speculation_options
from strata.interfaces.statistics import proposers, speculation
from strata.interfaces.tokenizer import FILES, Tokenizer


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


def test_figures_say_who_proposed() -> None:
    """Tokens by proposer, the sums being all of them; n-grams in a draft model's place are named as such."""
    found = SpeculationFigures()
    found.add(4, 3, True, 4, "ngram")
    assert proposers(found, "ngram") == "ngram"
    assert proposers(found, "draft") == "ngram in place of draft"
    found.add(2, 0, True, 1, "draft")
    assert proposers(found, "draft") == "ngram in place of draft: 3 of 4; draft: 0 of 1"
    for by, count in ((found.proposed_by, found.proposed), (found.tested_by, sum(found.tested_at))):
        assert sum(by.values()) == count
    assert found.accepted_by == {"ngram": 3, "draft": 0}


@pytest.mark.parametrize(
    ("costs", "name"),
    [(False, "slow"), (True, "ngram")],
)
def test_who_proposed_is_known_of_every_draft(costs: bool, name: str) -> None:
    """By the rule it is the draft model alone; where that never pays, n-grams take its place."""

    class Slow(Told):
        name, free, follows = "slow", False, False

    engine = open_model(load_config(None, configured()), remembered_machine()).engine
    estimate = (lambda rows, **at: 1.0) if costs else None
    slow = Slow({"a": [0] * 64}, 0.0, 8)
    slow.behind = lambda request: None if costs else 0  # type: ignore[method-assign]
    spare = NgramProposer() if costs else None
    clock = lambda: float(engine.metrics.steps)  # noqa: E731 - every step takes 1 s, all else nothing
    speculator = engine.speculator = Speculator(slow, LengthOptions(), estimate, clock, spare=spare)
    engine.add(Request("a", [5, 6, 7] * 12, SamplingParams(temperature=0.0, max_tokens=48)))
    while engine.busy:
        engine.step()
    assert set(speculator.figures.proposed_by) == {name}
    assert speculator.figures.proposed_by[name] == speculator.figures.proposed > 0


def test_a_draft_that_did_hardly_anything_is_said_to_have_not_paid() -> None:
    """Not as 0 % of 0.0 tokens."""
    figures = SpeculationFigures()
    speculator = SimpleNamespace(figures=figures, proposer=SimpleNamespace(name="draft", free=False))
    told = SimpleNamespace(model=SimpleNamespace(engine=SimpleNamespace(speculator=speculator)))
    assert speculation(told) == ["drafts   none: nothing promised to pay (draft)"]  # type: ignore[arg-type]
    for length in (1, *[0] * 99):
        figures.add(length, 0, length > 0, 1, "draft")
    (line,) = speculation(told)  # type: ignore[arg-type]
    assert "hardly any" in line and "1 tokens proposed in 100 passes, 0 accepted (draft)" in line
    speculator.proposer.free, figures.proposed = True, 0
    assert speculation(told) == []  # type: ignore[arg-type]


def test_a_terminal_is_told_of_the_draft(
    machine: HardwareProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "watched", lambda: True)
    for options, shown in (({"draft": "demo-draft"}, True), ({}, False)):
        start.announce(
            plan_run(model_path("demo"), load_config(None, configured(**options)), machine), machine, "x"
        )
        assert ("\ndraft    strata-demo-draft proposes tokens" in capsys.readouterr().err) == shown


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


@pytest.mark.parametrize("command", [["run", "demo", "-p", "x"], ["plan", "demo"]])
@pytest.mark.parametrize("flag", ["-md", "--model-draft", "--draft-model"])
def test_a_draft_that_is_not_there_is_named_as_the_draft(command: list[str], flag: str) -> None:
    result = CliRunner().invoke(strata, [*command, flag, "/nowhere"])
    assert "the draft (--model-draft): /nowhere: no such file" in str(result.exception)


def test_a_draft_that_is_too_long_is_named_by_the_usual_flag() -> None:
    result = CliRunner().invoke(strata, ["run", "demo", "-p", "x", "--draft", "4000"])
    assert str(result.exception).startswith("--draft: speculative.most: '4000' is out of range")


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """The demo's draft with a tokenizer that lacks too many of the demo's tokens."""
    path = tmp_path / "stranger"
    shutil.copytree(model_path("demo-draft"), path)
    vocabulary = json.loads((path / "tokenizer.json").read_text())
    model = vocabulary["model"]
    model["vocab"] = {word: i for word, i in model["vocab"].items() if not 1000 <= i < 2100}
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    return path


def test_plan_refuses_a_draft_that_run_refuses(stranger: Path, machine: HardwareProfile) -> None:
    """With the same message; where the model has no tokenizer yet, nothing can be compared."""
    options = configured(draft=str(stranger))
    with pytest.raises(ConfigError, match="it spells 2996") as planned:
        plan_model(load_config(None, options), machine)
    tokenizer = Tokenizer.load(model_path("demo"))
    with pytest.raises(ConfigError) as run:
        speculation_options(load_config(None, options), machine, tokenizer)
    assert str(planned.value) == str(run.value)
    for name in FILES:
        (stranger / name).unlink(missing_ok=True)
    assert plan_model(load_config(None, options), machine).draft is not None


def test_plan_shows_the_draft() -> None:
    result = CliRunner().invoke(strata, ["plan", "demo", "-md", "demo-draft", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["draft"]["model"] == "strata-demo-draft"


def test_off_means_off(machine: HardwareProfile) -> None:
    for options in ({"use": "off"}, {"most": "0"}):
        assert open_model(load_config(None, configured(**options)), machine).engine.speculator is None
