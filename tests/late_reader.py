"""A reader of expert records whose reads end when, and how, a test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import StoreError

POISON = 0xA5


@cache
def record_of(expert: ExpertId, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that belong to one expert and no other."""
    seed = np.random.default_rng([expert.layer, expert.index])
    return seed.integers(0, 256, nbytes, dtype=np.uint8)


class LateReader:
    """Reads begin and end in random order. While a read is under way, its place holds poison.

    fails: whether the read of an expert goes wrong. record: its bytes.
    """

    def __init__(
        self,
        seed: int,
        fails: Callable[[ExpertId], bool] = lambda _: False,
        record: Callable[[ExpertId, int], NDArray[np.uint8]] = record_of,
    ) -> None:
        self._random = random.Random(seed)
        self.fails = fails
        self._record = record
        self._queued: dict[int, tuple[ExpertId, NDArray[np.uint8]]] = {}
        self._begun: dict[int, tuple[ExpertId, NDArray[np.uint8]]] = {}
        self.submitted: list[ExpertId] = []
        self.urgent: set[int] = set()

    def submit(self, expert: ExpertId, into: NDArray[np.uint8], *, urgent: bool) -> int:
        ticket = len(self.submitted)
        self.submitted.append(expert)
        assert not any(np.shares_memory(into, other) for _, other in self.under_way().values())
        into[:] = POISON
        self._queued[ticket] = expert, into
        if urgent:
            self.urgent.add(ticket)
        return ticket

    def under_way(self) -> dict[int, tuple[ExpertId, NDArray[np.uint8]]]:
        return {**self._queued, **self._begun}

    def hurry(self, ticket: int) -> None:
        assert ticket in self.under_way()
        self.urgent.add(ticket)

    def cancel(self, ticket: int) -> bool:
        return self._queued.pop(ticket, None) is not None

    def finished(self, seconds: float) -> list[tuple[int, StoreError | None]]:
        for ticket in list(self._queued):
            if self._random.random() < 0.5:
                self._begun[ticket] = self._queued.pop(ticket)
        if seconds > 0 and not self._begun and self._queued:
            ticket = self._random.choice(list(self._queued))
            self._begun[ticket] = self._queued.pop(ticket)
        ended = [ticket for ticket in self._begun if self._random.random() < 0.5]
        if seconds > 0 and not ended and self._begun:
            ended = [self._random.choice(list(self._begun))]
        self._random.shuffle(ended)
        return [(ticket, self._end(ticket)) for ticket in ended]

    def _end(self, ticket: int) -> StoreError | None:
        expert, into = self._begun.pop(ticket)
        if self.fails(expert):
            return StoreError(f"{expert} cannot be read")
        into[:] = self._record(expert, len(into))
        return None

    def close(self) -> None:
        self._queued.clear()
        self._begun.clear()
