"""Stores of layers that predict further tokens, as users meet them: as drafts of their models, by path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import further_checkpoint
import pytest
from click.testing import CliRunner

from strata.config import Override, load_config
from strata.errors import ConfigError, UnsupportedError
from strata.interfaces.calibration import open_weights
from strata.interfaces.cli import strata
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.planning import plan_model
from strata.interfaces.speculation import speculation_options
from strata.interfaces.tokenizer import Tokenizer


def invoke(*arguments: str | Path) -> str:
    result = CliRunner().invoke(strata, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and `further`, of one checkpoint."""
    folder = tmp_path_factory.mktemp("mtp")
    source = further_checkpoint.write_checkpoint(folder / "hf")
    invoke("convert", source, "--out", folder / "model")
    invoke("convert", source, "--further", "--out", folder / "further")
    return folder


def configured(model: Path, draft: Path, **options: str) -> list[Override]:
    asked = {"model.path": str(model), "speculative.draft": str(draft), **options}
    return [Override(option, text, "test") for option, text in asked.items()]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_run_with_the_models_own_layer(stores: Path, backend: str) -> None:
    """The layer of this checkpoint is always right, and the text the same as without."""
    found: list[dict[str, Any]] = []
    for flags in (["--no-draft"], ["-md", stores / "further"]):
        command = ["run", stores / "model", "--temp", "0", "-n", "48", "--raw", "--json", "-p", "A"]
        options = ["--set", f"backend.name={backend}", "--set", "speculative.costs=false"]
        found.append(json.loads(invoke(*command, *options, *flags)))
    plain, drafted = found
    assert plain["text"] == drafted["text"] == "".join(map(chr, range(ord("B"), ord("B") + 48)))
    figures = drafted["speculation"]
    assert figures["proposer"] == "mtp" and figures["tested_at"][0] >= 3
    assert figures["accepted_at"] == figures["tested_at"]
    assert figures["forwards"] <= 6


def test_the_plan_has_room_for_it(stores: Path) -> None:
    """Its weights and its KV, of one layer."""
    machine = remembered_machine()
    config = load_config(None, configured(stores / "model", stores / "further"))
    plan = plan_model(config, machine)
    parts = {part.name: part.nbytes for part in plan.host.parts}
    assert plan.draft is not None and plan.draft.cpus == ()
    assert parts["draft weights"] == plan.draft.weights > 0
    assert parts["draft KV"] == plan.draft.nbytes == plan.kv.nbytes // further_checkpoint.LAYERS
    assert "draft     " in invoke(
        "plan", stores / "model", "--set", f"speculative.draft={stores / 'further'}"
    )
    engine = open_model(config, machine).engine
    assert engine.speculator is not None
    assert engine.speculator.proposer.pages.total == plan.draft.pages  # type: ignore[attr-defined]


def test_the_promise_is_the_one_that_was_asked_for(stores: Path) -> None:
    for promise in ("request", "window"):
        asked = configured(stores / "model", stores / "further", **{"speculative.promise": promise})
        config = load_config(None, asked)
        options = speculation_options(config, remembered_machine(), Tokenizer.load(stores / "model"))
        assert options is not None and options.promise == promise


def test_its_parameters_are_those_of_its_tensors(stores: Path) -> None:
    """With the matrix that joins hidden state and embedding, and the norms before it."""
    for name in ("model", "further"):
        found = json.loads(invoke("inspect", stores / name, "--json"))
        counted = sum(part["parameters"] for part in found["parts"].values())
        biases = found["moe_layers"] * found["experts"]  # a buffer of each router: no parameters
        assert found["parameters"]["total"] == counted - biases
        assert bool(found["parameters"]["join"]) == (name == "further")


def test_it_is_no_model_itself(stores: Path) -> None:
    with pytest.raises(UnsupportedError, match="MTP head") as caught:
        open_model(load_config(None, [Override("model.path", str(stores / "further"), "test")]))
    assert "-md" in str(caught.value.remedy)
    with pytest.raises(UnsupportedError, match="MTP head"):
        open_weights(stores / "further")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "its hidden size is 64, that of .* is 128"),
        ({"vocab_size": 320}, "its vocabulary is 259, that of .* is 320"),
    ],
)
def test_a_layer_of_another_model_is_refused(
    stores: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    other = further_checkpoint.write_checkpoint(tmp_path / "hf", **changes)
    invoke("convert", other, "--out", tmp_path / "model")
    config = load_config(None, configured(tmp_path / "model", stores / "further"))
    with pytest.raises(ConfigError, match=message):
        open_model(config)
    with pytest.raises(ConfigError, match=message):
        plan_model(config, remembered_machine())


def test_a_device_beside_it_is_refused_by_name(stores: Path) -> None:
    asked = configured(stores / "model", stores / "further", **{"device.use": "emulated"})
    with pytest.raises(UnsupportedError, match="hidden states, which the hybrid backend") as caught:
        open_model(load_config(None, asked))
    assert "device.use: none" in str(caught.value.remedy)
