"""device.use and device.kernels: one code path from the command line down to the call that launches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from strata.backends.cuda.kernel_set import CudaKernels
from strata.config import Override, load_config
from strata.errors import ConfigError
from strata.interfaces.hardware import device_run, remembered_machine
from strata.interfaces.models import open_model

DEMO = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
EMULATED = ("device.use=emulated", "device.kernels=cuda", "device.reserve=1GiB")


def settings(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


# Both kinds of kernels must give one text. Forty slots of 192 experts: some stay, some come and go.
def test_the_demo_runs_on_cuda_kernels_from_the_command_line(strata: Any) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    asked = ("run", "--config", DEMO, "-p", "Who are you?", "--set", "sampling.max_tokens=3")
    few = settings(*EMULATED, "experts.slots=40", "experts.misses=fetch")
    wanted = strata(*asked, *settings("device.use=none"))
    found = strata(*asked, *few)
    assert found.code == 0 and found.out == wanted.out != ""


def test_what_is_made_is_what_was_asked_for() -> None:
    config = load_config(DEMO, [Override.parse(pair) for pair in (*EMULATED, "model.context=64")])
    backend: Any = open_model(config).engine.decoder.backend
    assert not backend.options.graphs
    assert isinstance(backend.kernels, CudaKernels) and backend.device.name == "emulated"


def test_a_machine_without_a_card_says_what_is_missing(strata: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("strata.hardware.gpu_stack.graphics_cards", lambda root: ())
    monkeypatch.setattr("strata.hardware.gpu_stack.load_nvml", lambda: None)
    monkeypatch.setattr("strata.hardware.gpu_stack._module_version", lambda root: "")
    found = strata("run", "--config", DEMO, "-p", "hi", *settings("device.use=cuda"))
    assert found.code == 1 and "device.use is cuda, and there is no NVIDIA card" in found.err
    assert "remedy: " in found.err


@pytest.mark.parametrize(("use", "kernels"), [("cuda", "host"), ("none", "cuda"), ("auto", "cuda")])
def test_kernels_that_the_device_cannot_run(use: str, kernels: str) -> None:
    pairs = (f"device.use={use}", f"device.kernels={kernels}")
    config = load_config(DEMO, [Override.parse(pair) for pair in pairs])
    with pytest.raises(ConfigError, match=rf"device\.kernels is {kernels} .*device\.use is {use}"):
        device_run(config, remembered_machine())


@pytest.mark.parametrize("use", ["none", "auto", "emulated"])
def test_int8_activations_without_kernels_of_a_card(use: str) -> None:
    pairs = (f"device.use={use}", "device.activations=int8")
    config = load_config(DEMO, [Override.parse(pair) for pair in pairs])
    with pytest.raises(ConfigError, match=r"(?s)device\.activations is int8 .*backend\.activations"):
        device_run(config, remembered_machine())


def test_graphs_are_of_cuda_kernels() -> None:
    asked = [Override.parse(pair) for pair in (*EMULATED, "device.graphs=true")]
    run = device_run(load_config(DEMO, asked), remembered_machine())
    assert run is not None and run.graphs
    config = load_config(DEMO, [*asked, Override.parse("device.kernels=host")])
    with pytest.raises(ConfigError, match=r"device\.graphs is true .*device\.kernels is host"):
        device_run(config, remembered_machine())
