"""What a decoding step asks of the driver. The numbers are the kernels' and the backend's: less is better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import strata
from strata.config import Override, load_config
from strata.errors import UnsupportedError
from strata.interfaces import cli, dry_launching
from strata.interfaces.dry_launching import Scene, to_json
from strata.plan.cost import DENSE_LAYER_KERNELS, MOE_LAYER_KERNELS
from strata.plan.figures import CALL_SECONDS

DEMO = str(Path(strata.__file__).parents[1] / "configs" / "demo.yaml")
LAUNCH = 4e-6
MOE_LAYER = 7
"""Of one request, all experts on the device. The aim was 8."""


@pytest.fixture(scope="module")
def counted() -> list[tuple[Scene, dict[str, object]]]:
    config = load_config(DEMO, [])
    return [(scene, to_json(scene, found, LAUNCH)) for scene, found in dry_launching.count(config, [1, 4])]


def test_launches_of_a_layer(counted: list[tuple[Scene, dict[str, object]]]) -> None:
    (_, one), *_ = counted
    by_layer = one["launches_by_layer"]
    assert isinstance(by_layer, list) and len(by_layer) == 6
    assert by_layer[-1] == MOE_LAYER
    assert max(by_layer) == MOE_LAYER + 1, "the others guess what the next layer's router will say"
    assert max(by_layer) == MOE_LAYER_KERNELS, "what plans reckon with"
    assert one["launches"] == sum(by_layer) + one["launches_outside_layers"]  # type: ignore[operator]
    kernels = one["kernels_of_last_layer"]
    assert isinstance(kernels, dict) and sum(kernels.values()) == MOE_LAYER and kernels["norm_route"] == 1


def test_launches_of_a_dense_layer() -> None:
    config = load_config(None, [Override("model.path", "demo-draft", "test")])
    _, found = next(dry_launching.count(config, [1]))
    assert {found.of_layer(layer) for layer in range(found.layers)} == {DENSE_LAYER_KERNELS}


def test_a_graph_is_one_launch(counted: list[tuple[Scene, dict[str, object]]]) -> None:
    (_, one), _, (scene, graphs), *_ = counted
    assert scene.graphs and scene.rows == 1
    kernels = graphs["kernels_of_last_layer"]
    assert isinstance(kernels, dict) and kernels["graph of 5"] == 1 and sum(kernels.values()) == 3
    assert float(str(one["launches"])) - float(str(graphs["launches"])) == 4 * 6, "five kernels of each layer"


def test_one_wait_per_layer_and_none_for_the_device(counted: list[tuple[Scene, dict[str, object]]]) -> None:
    for _, found in counted:
        assert found["host_waits"] == {"routes": 6.0, "best logits": 1.0}
        assert found["synchronisations"] == 0


def test_the_scenes_differ_in_what_is_missing(counted: list[tuple[Scene, dict[str, object]]]) -> None:
    (_, here), _, _, (_, fetched), (_, computed) = counted
    moved = [found["copied_bytes"] for found in (here, fetched, computed)]
    assert moved[0]["h2d"] < 2_000, "rows and tables alone"  # type: ignore[index]
    assert moved[1]["h2d"] > 100_000, "a missed expert in each layer"  # type: ignore[index]
    assert moved[2]["d2h"] > moved[0]["d2h"], "the host reads the rows that it computes with"  # type: ignore[index]


def test_the_prediction_is_a_sum(counted: list[tuple[Scene, dict[str, object]]]) -> None:
    for _, found in counted:
        launches, calls = float(str(found["launches"])), float(str(found["driver_calls"]))
        assert found["predicted_seconds"] == pytest.approx(
            launches * LAUNCH + (calls - launches) * CALL_SECONDS
        )


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "demo", "--dry-launch", "-s", "2", "--json", "--launch-us", "10"]) == 0
    records = json.loads(capfd.readouterr().out)
    assert [record["rows"] for record in records] == [2, 2, 2, 2]
    assert [record["graphs"] for record in records] == [False, True, False, False]
    assert {record["launch_seconds"] for record in records} == {1e-5}
    assert cli.run(["bench", "demo", "--dry-launch", "-s", "2"]) == 0
    text = capfd.readouterr().out
    assert "every expert is on the device" in text and "6 for routes" in text and "(assumed)" in text


def test_a_model_without_kernels_is_refused_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the midst of an answer."""
    from strata.interfaces.models import open_model

    monkeypatch.setattr("strata.backends.cuda.attention.HEAD_DIMS", (128,))
    pairs = ("device.use=emulated", "device.kernels=cuda", "model.context=64")
    config = load_config(DEMO, [Override.parse(pair) for pair in pairs])
    with pytest.raises(UnsupportedError, match="heads of 64"):
        open_model(config)


def test_int8_activations_are_asked_for_by_the_configuration() -> None:
    """Of the demo only the head is in w8."""
    for asked, kernels in (("auto", {"linear_w8_1"}), ("int8", {"quantize_rows", "linear_w8a8_1"})):
        config = load_config(DEMO, [Override.parse(f"device.activations={asked}")])
        (_, found), *_ = dry_launching.count(config, [1])
        launched = set(found.by_kernel(None))
        assert {name for name in launched if "w8" in name or "quantize" in name} == kernels
