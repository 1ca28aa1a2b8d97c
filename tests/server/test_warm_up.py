"""Warm-up: what it does, what /health hears of it, and that it ends in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import load

from strata.interfaces.models import LoadedModel
from strata.interfaces.server.warm_up import SAMPLES, TOKENS, warm_up


@pytest.fixture
def model(tiny_store: Any) -> LoadedModel:
    return load(tiny_store)


class Clock:
    """Goes on by a second whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


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
    reports = run(model, 4.0, clock=Clock())
    assert len(reports) < len(SAMPLES) and model.engine.metrics.steps < 4


def test_it_ends_when_the_server_stops(model: LoadedModel) -> None:
    assert run(model, 3600, stopping=lambda: True) == [] and model.engine.metrics.steps == 0


def test_it_waits_for_the_experts_used_most(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SimpleNamespace(on_their_way=4)
    tier.collect = lambda seconds: setattr(tier, "on_their_way", tier.on_their_way - 1)
    monkeypatch.setattr(model.engine.decoder, "tier", tier)
    stage = "reading the experts used most"
    reports = run(model, 3600, stopping=lambda: tier.on_their_way == 0)
    assert reports == [(stage, share) for share in (0.0, 0.25, 0.5, 0.75)]
    tier.on_their_way = 1000
    assert 0 < len(run(model, 5.0, clock=Clock())) < 10
