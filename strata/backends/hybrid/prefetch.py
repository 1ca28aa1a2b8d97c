"""Guesses: the next layer's router, asked with this layer's rows, says which experts may be needed soon.

The residual changes little from layer to layer, so the guess is often right: of the demo model, which has six
layers, 79 % of what a router chooses is guessed. (Before this layer's experts have joined, in the launch of
this layer's router, it would be 67 %.) A guess costs a small kernel and a copy of a few hundred bytes, and
what it fetches crosses only when nobody else needs the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.device_ops import DeviceOps
from strata.backends.hybrid.readback import Readback
from strata.backends.hybrid.slots import SlotLoader
from strata.backends.hybrid.split import WEIGHT
from strata.backends.parts import Router
from strata.core import ExpertId
from strata.memory.expert_slots import Claim
from strata.memory.transfer import Priority


@dataclass
class PrefetchMetrics:
    """fetched: experts that a guess claimed a slot for; needed: of them, those the router chose then;
    cancelled: wrong ones that were stopped before they crossed. skipped: guesses with no idle bus."""

    fetched: int = 0
    needed: int = 0
    cancelled: int = 0
    skipped: int = 0


class Prefetcher:
    """One guess at a time: `ask` in a layer, `collect` whenever the answer may be there, `judge` in the next.

    least: the share of a token's weight that makes a guess worth the bus. bytes_per_s: of the bus.
    """

    def __init__(
        self, ops: DeviceOps, loader: SlotLoader, readback: Readback, least: float, bytes_per_s: float
    ) -> None:
        self.metrics = PrefetchMetrics()
        self._ops = ops
        self._loader = loader
        self._readback = readback
        self._least = least
        self._bytes_per_s = bytes_per_s
        self._asked: tuple[int, int] | None = None  # the layer and its running count
        self._fetched: tuple[int, list[int]] = -1, []
        self._last_ask = 0.0
        self._interval = 0.0  # between two layers, a running mean

    def ask(self, residual: Matrix, router: Router, layer: int, due: int) -> None:
        """Launch the guess of what the router of `layer`, the next one, will say."""
        ops, now = self._ops, self._ops.device.now()
        self._interval += WEIGHT * (now - self._last_ask - self._interval)
        self._last_ask = now
        self._readback.start(ops.guess_routes(residual, router), None)
        self._asked = layer, due

    def collect(self) -> None:
        """Queue what the answer names, if it is there and the bus has nothing better to do."""
        if self._asked is None or (read := self._readback.finish_if_there()) is None:
            return
        (layer, due), self._asked = self._asked, None
        room = self._room(layer)
        self.metrics.skipped += room < 1
        fetched = []
        for index in self._candidates(layer, read.ids, read.weights)[:room]:
            claim = self._loader.cache.admit(ExpertId(layer, index))
            if isinstance(claim, Claim):
                self._loader.load(claim, Priority.SPECULATIVE, due)
                fetched.append(index)
        self._fetched = layer, fetched
        self.metrics.fetched += len(fetched)
        self._loader.queue.pump()

    def judge(self, layer: int, ids: NDArray[np.int32]) -> None:
        """The router of `layer` has spoken: stop what it did not choose, before its experts are acquired."""
        self._asked = None
        guessed, fetched = self._fetched
        self._fetched = -1, []
        if guessed != layer:
            return
        wrong = [index for index in fetched if index not in ids]
        self.metrics.needed += len(fetched) - len(wrong)
        self.metrics.cancelled += self._loader.cancel(ExpertId(layer, index) for index in wrong)

    def _candidates(self, layer: int, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> list[int]:
        """Absent experts that some row gives enough weight, the heaviest first; none from the disk, for which
        the host would wait."""
        shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-20))
        heaviest = np.zeros(int(ids.max()) + 1, np.float32)
        np.maximum.at(heaviest, ids.reshape(-1), shares.reshape(-1))
        ranked = np.argsort(-heaviest, kind="stable").tolist()
        worth = [ExpertId(layer, i) for i in ranked if 0 < heaviest[i] >= self._least]
        has, is_near = self._loader.has, self._loader.source.is_near
        return [expert.index for expert in worth if not has(expert) and is_near(expert)]

    def _room(self, layer: int) -> int:
        """Experts that cross until the next layer needs them, if nothing else is on the bus."""
        queue = self._loader.queue
        if queue.queued or queue.bytes_under_way(Priority.NOW) or queue.bytes_under_way(Priority.NEXT):
            return 0
        idle = self._interval * self._bytes_per_s - queue.bytes_under_way(Priority.SPECULATIVE)
        return int(idle // self._loader.source.bank(layer).layout.record_bytes)
