"""Warm-up: what it does, what /health hears of it, and that it ends in time."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import load
from ticking_clock import TickingClock

from strata.core import Request, SamplingParams
from strata.engine.tier import load_heat
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.warm_up import SAMPLES, TOKENS, warm_up
from strata.memory.heat import HEAT
from strata.store.reader import Store


@pytest.fixture
def model(tiny_store: Any) -> LoadedModel:
    return load(tiny_store)


def run(model: LoadedModel, seconds: float, **options: Any) -> list[tuple[str, float | None]]:
    reports: list[tuple[str, float | None]] = []
    warm_up(model, lambda stage, share: reports.append((stage, share)), seconds, **options)
    assert not model.engine.busy
    model.engine.check_integrity()
    return reports


def test_samples_are_answered(model: LoadedModel) -> None:
    reports = run(model, 3600)
    assert reports == [("warming up", number / len(SAMPLES)) for number in range(len(SAMPLES))]
    assert model.engine.metrics.total.decode.tokens == len(SAMPLES) * (TOKENS - 1)


def test_it_ends_when_its_time_is_up(model: LoadedModel) -> None:
    """In the middle of an answer, too: a step is not interrupted, the next one does not begin."""
    reports = run(model, 4.0, clock=TickingClock())
    assert len(reports) < len(SAMPLES) and model.engine.metrics.steps < 4


def test_it_ends_when_the_server_stops(model: LoadedModel) -> None:
    assert run(model, 3600, stopping=lambda: True) == [] and model.engine.metrics.steps == 0


def answer(model: LoadedModel) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    return list(model.engine.generate(Request("a", model.encode_text("Hello"), sampling, model.stop_ids)))


@pytest.fixture(scope="module")
def cold(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What is answered without any heat file."""
    store = tmp_path_factory.mktemp("cold") / "store"
    shutil.copytree(tiny_store, store, ignore=shutil.ignore_patterns(HEAT))
    started = load(store, device_use="emulated")
    assert HEAT not in started.note
    return answer(started)


HEATS: dict[str, Any] = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not a number": lambda text: text.replace("1.0", "NaN"),
    "endless": lambda text: text.replace("1.0", "Infinity"),
    "negative": lambda text: text.replace("1.0", "-1.0"),
    "huge": lambda text: text.replace("1.0", "9" * 5000),
    "another model": lambda text: text.replace('"model": "', '"model": "x'),
    "no list": lambda text: text.replace("[", "{", 1),
    "other layers": lambda text: text.replace('"layers": [', '"layers": [{"steps": 0, "uses": []}, '),
    "deep": lambda text: "[" * 100_000,
    "no text": lambda text: "\udcff\udcfe",
    "a folder": None,
}


@pytest.mark.parametrize("kind", HEATS)
def test_a_broken_heat_file_costs_nothing_but_warmth(
    kind: str, tiny_store: Path, tmp_path: Path, cold: list[int]
) -> None:
    """At the start with a cache of experts, which that file says to fill; answers are the same."""
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    heat = load_heat(Store.open(store)).heat
    heat.add(next(n for n, count in enumerate(heat.space.per_layer) if count), [0])
    assert not heat.save(store)
    good = (store / HEAT).read_text()
    assert "1.0" in good
    if HEATS[kind] is None:
        (store / HEAT).unlink()
        (store / HEAT).mkdir()
    else:
        (store / HEAT).write_text(HEATS[kind](good), errors="surrogateescape")
    started = load(store, device_use="emulated")
    assert HEAT in started.note, "its owner is told"
    warm_up(started, lambda stage, share: None, 3600)
    assert [answer(started), answer(started)] == [cold] * 2
    started.engine.check_integrity()


def test_it_waits_for_the_experts_used_most(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SimpleNamespace(on_their_way=4)
    tier.collect = lambda seconds: setattr(tier, "on_their_way", tier.on_their_way - 1)
    monkeypatch.setattr(model.engine.decoder, "tier", tier)
    stage = "reading the experts used most"
    reports = run(model, 3600, stopping=lambda: tier.on_their_way == 0)
    assert reports == [(stage, share) for share in (0.0, 0.25, 0.5, 0.75)]
    tier.on_their_way = 1000
    assert 0 < len(run(model, 5.0, clock=TickingClock())) < 10
