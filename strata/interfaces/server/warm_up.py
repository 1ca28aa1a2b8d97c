"""Before the first client: the experts that are used most are in memory, and every part has run once."""

from __future__ import annotations

import time
from collections.abc import Callable

from strata.config.schema import ServerConfig
from strata.core import Request, SamplingParams
from strata.interfaces.models import LoadedModel

Report = Callable[[str, float | None], None]

SAMPLES = (
    "The history of the city begins with a small market beside the river, where merchants",
    "def mean(values: list[float]) -> float:\n    return",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", ',
    "Die Summe zweier gerader Zahlen ist immer gerade, denn",
)
"""Prose, code, data and another language: they are routed to different experts."""
TOKENS = 4
"""Of each answer."""
_LOOK_SECONDS = 0.1


def warm_up_seconds(config: ServerConfig) -> float:
    """What it may take; 0: it is left out."""
    return float(config.warm_up_seconds) if config.warm_up else 0.0


def warm_up(
    model: LoadedModel,
    report: Report,
    seconds: float,
    stopping: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait for hot experts that are being read, then answer samples; ends after about so many seconds.

    In the engine's thread. report: told what is done, and its share. The step or read that is under way when
    the time is up is finished.
    """
    end = clock() + seconds

    def enough() -> bool:
        return stopping() or clock() >= end

    _await_hot_experts(model, report, enough)
    for number, text in enumerate(SAMPLES):
        if enough():
            return
        report("warming up", number / len(SAMPLES))
        _answer(model, number, text, enough)


def _await_hot_experts(model: LoadedModel, report: Report, enough: Callable[[], bool]) -> None:
    """What the store's heat.json names is read in the background, from the disk tier's beginning on."""
    tier = model.engine.decoder.tier
    if tier is None:
        return
    wanted = tier.on_their_way
    while tier.on_their_way and not enough():
        report("reading the experts used most", 1.0 - tier.on_their_way / wanted)
        tier.collect(_LOOK_SECONDS)


def _answer(model: LoadedModel, number: int, text: str, stop: Callable[[], bool]) -> None:
    room = model.context - TOKENS
    ids = model.encode_text(text)[: max(room, 1)]
    if not ids or room < 1:
        return
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for _ in model.engine.generate(Request(f"warm-up-{number}", ids, sampling, model.stop_ids), stop):
        pass
