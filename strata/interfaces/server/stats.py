"""GET /stats: what the page's live view shows, as JSON for anybody."""

from __future__ import annotations

import time
from typing import Any

from strata.engine.engine import Engine
from strata.engine.gauges import RouteHeat, expert_counts, regions
from strata.interfaces.server.health import health
from strata.interfaces.server.service import Service


class Stats:
    """The figures of one service. Counters only grow: two answers make a rate."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._heat: RouteHeat | None = None

    def now(self) -> dict[str, Any]:
        """In the event loop. `now` is a clock in seconds; its zero means nothing."""
        thread, state = self._service.thread, health(self._service)
        engine = thread.engine
        return {
            "now": time.monotonic(),
            "status": state["status"],
            "model": state["model"],
            "loading": state["loading"],
            "context": engine.options.context if engine is not None else None,
            "requests": {
                "running": thread.running,
                "waiting": thread.waiting,
                "most_running": engine.options.max_running if engine is not None else None,
                "queue": self._service.config.server.queue,
            },
            "tokens": _tokens(engine),
            "regions": _regions(engine),
            "experts": self._experts(engine),
        }

    def _experts(self, engine: Engine | None) -> dict[str, Any] | None:
        if engine is None or engine.decoder.spec.experts is None:
            return None
        if self._heat is None:  # from the first question on; an observer costs nothing while nobody asks
            self._heat = RouteHeat(engine)
            engine.observers.append(self._heat)
        counts = expert_counts(engine)
        return {
            "layers": self._heat.layers,
            "count": int(self._heat.uses.shape[1]),
            "heat": self._heat.shades(),
            "layer_hits": list(counts.hits),
            "layer_misses": list(counts.misses),
            "hits": counts.hit,
            "late": counts.late,
            "fetched": counts.fetched,
            "streamed": counts.streamed,
            "computed": counts.computed,
        }


def _tokens(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    total = engine.metrics.total
    return {
        "steps": engine.metrics.steps,
        "prefill": total.prefill.tokens,
        "prefill_seconds": total.prefill.seconds,
        "decode": total.decode.tokens,
        "decode_seconds": total.decode.seconds,
    }


def _regions(engine: Engine | None) -> list[dict[str, Any]]:
    if engine is None:
        return []
    return [
        {
            **{"tier": tier, "name": level.name, "kept": kept},
            **{"used": level.used, "total": level.total, "peak": level.peak},
        }
        for tier, level, kept in regions(engine)
    ]
