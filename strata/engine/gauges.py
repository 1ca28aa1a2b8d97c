"""What an engine's memory and its experts look like at this moment, for /stats, its page and /metrics.

Any thread may ask: single numbers and short lists are read, which need not be of the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.engine.engine import Engine, StepDone
from strata.memory.regions import Level

_WATCHED_SECONDS = 10.0
_HALF_LIFE_STEPS = 100.0
_HOTTEST = 255


class TierLevel(NamedTuple):
    """tier: "device" or "host". kept: bytes that are free, but hold prefixes that prompts may share."""

    tier: str
    level: Level
    kept: int = 0


@dataclass(frozen=True)
class ExpertCounts:
    """How routed experts were answered since the start. hits, misses: of decode, by layer, () without an
    expert cache. late: misses that were on their way already; streamed: fetched, but into no slot."""

    hits: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    hit: int = 0
    late: int = 0
    fetched: int = 0
    streamed: int = 0
    computed: int = 0


def regions(engine: Engine) -> Iterator[TierLevel]:
    """Water levels of every part of memory that fills and empties, in bytes."""
    page, tiers, device = engine.kv.page_bytes, engine.tiers, getattr(engine.decoder.backend, "memory", None)
    if tiers is None or device is None:
        used = (engine.pages.total - engine.pages.free) * page
        level = Level("KV pages", used, engine.pages.total * page, used)
        yield TierLevel("host", level, engine.pages.kept * page)
    else:
        cache: Any = engine.decoder.backend.cache  # type: ignore[attr-defined]
        held = cache.slots - cache.free, tiers.device.total - tiers.device.free
        yield from (TierLevel("device", level) for level in device.region.levels(*held))
        used = (tiers.host.total - tiers.host.free) * page
        yield TierLevel("host", Level("KV pages", used, tiers.host.total * page, used))
    if engine.decoder.tier is not None:
        kept = engine.decoder.tier
        used = (kept.cache.slots - kept.cache.free) * kept.place_bytes
        yield TierLevel("host", Level("experts", used, kept.cache.slots * kept.place_bytes, used))


def expert_counts(engine: Engine) -> ExpertCounts:
    """Of the device's expert cache; without a device the host computes all of them, which nobody counts."""
    metrics: Any = getattr(engine.decoder.backend, "metrics", None)
    if metrics is None:
        return ExpertCounts()
    flow, cache = metrics.experts, metrics.cache
    totals = flow.hits, flow.late, flow.fetched, flow.streamed, flow.computed
    return ExpertCounts(tuple(cache.layer_hits), tuple(cache.layer_misses), *totals)


@dataclass
class RouteHeat:
    """An observer that counts how often each expert is routed to; a use counts half after 100 steps.

    Counts only while somebody looks: 10 seconds after the last `shades`. 2 us per layer and step.
    """

    engine: Engine
    uses: NDArray[np.float64] = field(init=False)
    _asked: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        spec = self.engine.decoder.spec
        count = spec.experts.router.experts if spec.experts is not None else 0
        self.layers = [index for index in range(spec.layers) if spec.is_moe(index)]
        self.uses = np.zeros((len(self.layers), count))
        self._keep = 0.5 ** (1 / _HALF_LIFE_STEPS)

    def __call__(self, step: StepDone) -> None:
        """A step is over; in the engine's thread."""
        if not self.layers or time.monotonic() - self._asked > _WATCHED_SECONDS:
            return
        self.uses *= self._keep
        ids = self.engine.decoder.routes.ids
        for row, layer in enumerate(self.layers):
            if layer in ids:
                self.uses[row] += np.bincount(ids[layer].ravel(), minlength=self.uses.shape[1])

    def shades(self) -> list[str]:
        """For each layer two hexadecimal digits per expert: 00 not used, ff the most used of all."""
        self._asked = time.monotonic()
        most = float(self.uses.max(initial=0.0))
        scaled = (
            np.sqrt(self.uses / most) if most > 0 else self.uses
        )  # few are hot: the root shows the others
        return [row.tobytes().hex() for row in np.rint(scaled * _HOTTEST).astype(np.uint8)]
