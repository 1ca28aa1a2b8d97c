"""`strata plan` as scripts and people see it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from strata.config import Override, load_config
from strata.errors import CapacityError
from strata.hardware.profile_file import load_profile
from strata.interfaces import cli, start
from strata.interfaces.hardware import remembered_machine
from strata.interfaces.models import open_model
from strata.interfaces.plan_report import report, summary
from strata.interfaces.planning import model_of, plan_model
from strata.plan.host import PROCESS_SHARE

XEON = ("--hardware", "rtx3090-2x-e5-2680v4")


@pytest.fixture
def strata(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def test_a_config_a_checkpoint_and_a_store_give_the_same_plan(
    strata: Any, checkpoint: Path, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "bare")
    plans = []
    for path in (tmp_path / "bare", tmp_path / "bare" / "config.json", checkpoint, store):
        code, out, _ = strata("plan", path, *XEON, "--json")
        assert code == 0
        plan = json.loads(out)
        # Plain tensors of the checkpoint are F32 here; a config.json says nothing of that.
        plans.append((plan["kv"], plan["device"]["slots"], plan["threads"], plan["host"]["in_memory"]))
    assert plans[0] == plans[1] == plans[2] == plans[3]


def test_it_is_readable(strata: Any, checkpoint: Path) -> None:
    code, out, err = strata("plan", checkpoint, *XEON, "--context", "128", "--requests", "3", "--depth", "64")
    assert code == 0 and err == ""
    for text in (
        "tiny-moe on RTX 3090, two Xeon E5-2680 v4",
        "128 tokens x 3 requests",
        "node 1: 14, on CPUs 14-27",
        "device memory",
        "expert slots",
        "reserve",
        "partition",
        "decode, 3 requests at 64 tokens",
        "prefill of 64 tokens",
        "copies (field)",
        "none of this was run on a GPU",
    ):
        assert text in out, text
    assert all(line == line.rstrip() and len(line) < 160 for line in out.splitlines())


def test_this_machine(strata: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = strata("plan", store, "--json")
    plan = json.loads(out)
    assert code == 0 and plan["device"] is None and plan["kv"]["tier"] == "host"
    assert plan["hardware"]["node_read"][0]["source"] == "measured"
    assert len(plan["threads"][0]["cpus"]) >= 1


def test_a_card_that_is_asked_for_and_not_there_is_told(strata: Any, store: Path) -> None:
    code, out, err = strata("plan", store, "--set", "device.use=cuda", "--json")
    missing = json.loads(out)["device"] is None
    assert code == 0 and missing == ("this machine has no card: planned without one" in err)
    code, _, err = strata("plan", store, "--set", "device.use=cuda", *XEON)
    assert code == 0 and "no card" not in err


def test_options_come_from_files_and_flags(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model:\n  path: {checkpoint}\n  context: 64\nkv:\n  dtype: bf16\n  tier: host\n"
        "device:\n  memory: 6GiB\n  reserve: 1GiB\nexperts:\n  slots: 5\n  misses: cpu\n"
        "host:\n  memory: 10GiB\n  numa: interleave\nengine:\n  requests: 2\n  prefill_chunk: 32\n"
    )
    code, out, _ = strata("plan", "--config", file, *XEON, "--json", "--context", "96")
    plan = json.loads(out)
    assert code == 0
    assert (plan["kv"]["context"], plan["kv"]["requests"], plan["kv"]["dtype"]) == (96, 2, "bf16")
    assert (plan["kv"]["tier"], plan["misses"], plan["chunk"]) == ("host", "cpu", 32)
    assert (plan["device"]["total"], plan["device"]["slots"]) == (6 << 30, 5)
    assert {part["name"]: part["nbytes"] for part in plan["device"]["parts"]}["reserve"] == 1 << 30
    assert (plan["host"]["total"], plan["host"]["spread"]) == (10 << 30, "interleave")
    code, out, _ = strata("plan", "--config", file, *XEON, "--json", "--set", "device.use=none")
    assert code == 0 and json.loads(out)["device"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        ((), 2, ("no model is given",)),
        (("M", "--hardware", "rtx3090"), 2, ("no profile of that name", "rtx3090-2x-e5-2680v4")),
        (("M", *XEON, "--context", "9999"), 2, ("9999 tokens", "made for 256")),
        (("M", *XEON, "--context", "x"), 2, ("--context", "whole number")),
        (("M", *XEON, "--requests", "0"), 2, ("--requests", "out of range")),
        (("M", *XEON, "--set", "experts.slots=1"), 1, ("experts.slots is 1", "takes 2", "remedy")),
        (
            ("M", *XEON, "--set", "device.memory=2GiB", "--set", "kv.tier=device"),
            1,
            ("bytes of device memory are needed", "2147483648 are there", "device.reserve"),
        ),
        (("M", *XEON, "--set", "device.reserve=auto"), 2, ("device.reserve", "'auto' is not a size")),
        (("M", *XEON, "--set", "device.reserve=3"), 2, ("has no unit",)),
        (("/nowhere", *XEON), 2, ("/nowhere: no such file or directory",)),
    ],
)
def test_what_cannot_be_planned(
    strata: Any, checkpoint: Path, arguments: tuple[str, ...], code: int, texts: tuple[str, ...]
) -> None:
    found, out, err = strata("plan", *(str(checkpoint) if word == "M" else word for word in arguments))
    assert found == code and out == ""
    for text in texts:
        assert text in err, err


def test_a_run_has_the_pages_that_were_planned(checkpoint: Path, store: Path) -> None:
    """Context and pages of the engine are those of the plan, one request or several."""
    settings = (f"model.path={store}", "engine.requests=3", "kv.size=8MiB", "device.use=none")
    config = load_config(None, [Override.parse(text) for text in settings])
    plan = plan_model(config, load_profile("rtx3090-epyc-7302"))
    options = open_model(config).engine.options
    assert (options.context, options.pages) == (plan.kv.context, plan.kv.pages) == (256, 24)
    assert (options.page_tokens, options.kv_dtype, options.chunk) == (
        plan.kv.page_tokens,
        plan.kv.dtype,
        plan.chunk,
    )


def test_a_run_obeys_the_plan_that_is_printed(store: Path) -> None:
    """One decision: what `strata plan` prints for this machine is what a run was opened with."""
    settings = (f"model.path={store}", "engine.requests=2", "model.context=100", "backend.threads=1")
    config = load_config(None, [Override.parse(text) for text in (*settings, "device.use=none")])
    here = remembered_machine()
    printed = dataclasses.replace(plan_model(config, here), advice=())
    model = open_model(config, here)
    assert model.plan == printed
    options = model.engine.options
    assert (options.context, options.pages, options.chunk) == (100, printed.kv.pages, printed.chunk)
    assert model.engine.decoder.backend.cpu.threads == len(printed.cpus) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "lines"), [("rtx3090-2x-e5-2680v4", 3), ("rtx3090-epyc-7302", 2)])
def test_the_summary_of_a_start(store: Path, name: str, lines: int) -> None:
    """Where things lie and how fast it should be, in two lines or three."""
    machine, use = load_profile(name), "auto" if lines == 3 else "none"
    settings = (f"model.path={store}", "engine.requests=2", f"device.use={use}")
    plan = plan_model(load_config(None, [Override.parse(text) for text in settings]), machine)
    text = summary(plan, machine)
    assert len(text.splitlines()) == lines
    assert f"{plan.kv.context} tokens x 2" in text and f"{len(plan.cpus)} threads" in text
    assert f"decode {plan.predictions[0].tokens_per_second:.0f} tokens/s" in text and "limited by" in text
    assert ("expert slots" in text) == (lines == 3) and "not measured: " in text


def test_names_cannot_drive_the_terminal(store: Path) -> None:
    machine = load_profile("rtx3090-epyc-7302")
    plan = plan_model(load_config(None, [Override.parse(f"model.path={store}")]), machine)
    text = report(dataclasses.replace(plan, model="\x1b[2Jmodel[bold]"), machine)
    assert "\x1b" not in text and "[bold]" in text


def test_only_a_terminal_is_told(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = load_profile("rtx3090-epyc-7302")
    plan = plan_model(load_config(None, [Override.parse(f"model.path={store}")]), machine)
    start.announce(plan, machine, "1 MiB in plain pages")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(start, "watched", lambda: True)
    start.announce(plan, machine, "1 MiB in plain pages")
    out, err = capsys.readouterr()
    assert out == "" and err.strip() == summary(plan, machine) + "\nkv       1 MiB in plain pages"
    start.announce(plan, machine, "1 MiB", quality="w4g64: unmeasured", inputs="f32")
    shown = capsys.readouterr().err
    assert shown.endswith("\nkv       1 MiB\nquality  w4g64: unmeasured\ninputs   f32\n")


def test_a_run_refuses_experts_that_fit_once_and_were_asked_for_twice(store: Path) -> None:
    """case-34: checked again when a run starts, before anything is allocated; the remedy is what fits."""
    settings = (f"model.path={store}", "model.context=32", "host.numa=replicate")
    config = load_config(None, [Override.parse(text) for text in settings])
    model = model_of(config)
    shared = model.static + model.embedding + (0 if model.tied else model.head)
    memory = (shared + model.kv_ceiling(32, 1) + 3 * model.expert_total // 2) * PROCESS_SHARE // 3
    one = load_profile("rtx3090-2x-e5-2680v4")
    nodes = tuple(dataclasses.replace(node, memory=memory // 2, free=memory // 2) for node in one.nodes)
    small = dataclasses.replace(one, nodes=nodes, available=memory, device=None)
    with pytest.raises(
        CapacityError, match=r"host\.numa replicate needs .* bytes on each of 2 nodes"
    ) as refused:
        open_model(config, small)
    assert "interleave fits" in str(refused.value) or "partition fits" in str(refused.value)
