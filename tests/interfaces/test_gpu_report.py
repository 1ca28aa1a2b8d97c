"""The graphics card in `strata doctor`, on machines that tests put up: nothing here has met a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from strata.device.emulated import EmulatedDevice
from strata.device.link_speed import link_speed
from strata.hardware import gpu_stack
from strata.hardware.profile_file import load_profile
from strata.interfaces import gpu_report
from strata.plan.figures import device_figures

sys.path.append(str(Path(__file__).parents[1] / "hardware"))
from fake_nvml import FakeNvml
from machines import dual_xeon, epyc_single

VERSIONS = {gpu_stack.CUPY: "13.6.0", gpu_stack.NVRTC: "12.6.85"}


def text(facts: dict[str, Any]) -> str:
    return "\n".join(gpu_report.describe_gpu(facts))


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake, root = FakeNvml(), dual_xeon(tmp_path)
    stack = gpu_stack.gpu_stack(root, fake, VERSIONS.__getitem__)
    monkeypatch.setattr(gpu_report, "gpu_stack", lambda: stack)
    return fake


def test_a_whole_stack_in_a_few_lines(whole: FakeNvml) -> None:
    shown = text(gpu_report.examine_gpu(measure=False))
    assert "driver 550.54.14, cupy-cuda12x 13.6.0, nvidia-cuda-nvrtc-cu12 12.6.85" in shown
    assert "compute capability 8.6, 23 GiB of 24 GiB free" in shown
    assert "PCIe 4.0 x16 at most, now 1.0 x16" in shown and "not measured" in shown
    assert "missing" not in shown and "no kernel has run on a card so far" in shown


def test_the_link_under_load(whole: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = device_figures(load_profile("rtx3090-2x-e5-2680v4"))
    device = EmulatedDevice(figures)
    monkeypatch.setattr(gpu_report, "measured_link", lambda: link_speed(device, lambda: 3, 1 << 20))
    facts = gpu_report.examine_gpu(measure=True)
    assert facts["link"]["to_device"] == pytest.approx(figures.h2d.bytes_per_s, rel=0.2)
    assert "% of PCIe 3.0 x16" in text(facts) and device.memory.used == 0
    device.close()


def test_a_link_that_cannot_be_measured_says_why(whole: FakeNvml) -> None:
    """Here cupy is missing although its package was said to be there."""
    facts = gpu_report.examine_gpu(measure=True)
    assert facts["link"] is None and "pip install" in text(facts)


def test_without_a_card_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = gpu_stack.gpu_stack(epyc_single(tmp_path), None, VERSIONS.__getitem__)
    monkeypatch.setattr(gpu_report, "gpu_stack", lambda: stack)
    shown = text(gpu_report.examine_gpu(measure=True))
    assert shown.startswith("no NVIDIA card: models run on the processor") and "missing: " not in shown
    assert "compute capability 8.0 to 9.0" in shown and "driver 525" in shown
    assert "pip install" in shown and "cupy-cuda12x 13.6.0" in shown


def test_gaps_come_with_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = gpu_stack.gpu_stack(dual_xeon(tmp_path), None, lambda package: "")
    monkeypatch.setattr(gpu_report, "gpu_stack", lambda: stack)
    shown = text(gpu_report.examine_gpu(measure=False))
    assert "remedy: install NVIDIA's driver" in shown and shown.count("remedy: pip install") == 1
