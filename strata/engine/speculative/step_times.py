"""How long steps take by the rows they compute: measured, and estimated where nothing was measured yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Protocol

GAPS = (1, 2, 4, 8)
"""Draft rows that are measured before longer drafts are: later, when little may be lost, what is not known
must be thought the worst of."""


class Estimate(Protocol):
    """What a step is thought to take (`plan.cost`). Only ratios are used."""

    def __call__(self, rows: int, *, requests: int, depth: int) -> float:
        """Seconds of `rows` rows of `requests` requests with `depth` tokens of context each."""
        ...


KEPT = 5
"""Latest times of a step whose median counts: one that was disturbed changes nothing."""
PLAIN_TIMES = 3
"""Plain steps that are measured before anything is compared with them."""


class StepTimes:
    """Times of decoding steps, apart for each number of requests and each doubling of their context."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._tables: dict[tuple[int, int], StepTable] = {}
        self._latest: dict[int, StepTable] = {}

    def table(self, requests: int, tokens: int) -> StepTable:
        """For `requests` requests with `tokens` tokens of context together."""
        key = requests, tokens.bit_length()
        if key not in self._tables:
            depth = tokens // requests
            before = self._latest.get(requests)
            estimate = partial(self._estimate, requests=requests, depth=depth)
            self._tables[key] = StepTable(requests, estimate, before)
        self._latest[requests] = self._tables[key]
        return self._tables[key]


class StepTable:
    """before: another table whose shape is a better guess than the estimate's."""

    def __init__(
        self, requests: int, estimate: Callable[[int], float], before: StepTable | None = None
    ) -> None:
        self.requests = requests
        self._estimate = estimate
        self._before = before if before is not None and before.known else None
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._estimates: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether plain steps were measured."""
        return len(self._times.get(self.requests, ())) >= PLAIN_TIMES

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return self._medians[self.requests]

    def gap(self, rows: int) -> int | None:
        """A number of draft rows, one of GAPS and below `rows`, whose time is not known yet."""
        return next((more for more in GAPS if more < rows and not self._knows(self.requests + more)), None)

    def _knows(self, rows: int) -> bool:
        return rows in self._medians or (self._before is not None and self._before._knows(rows))

    def add(self, rows: int, seconds: float) -> None:
        """A step was measured."""
        times = self._times.setdefault(rows, deque(maxlen=KEPT))
        times.append(seconds)
        self._medians[rows] = median(times)

    def expected(self, rows: int) -> float:
        """Seconds of a step: measured, else between what was measured, else by the estimate's ratio."""
        if rows in self._medians:
            return self._medians[rows]
        low, high = self._beside(rows)
        if high is None:
            return self._medians[low] * self._shape(rows) / self._shape(low)
        part = (rows - low) / (high - low)
        return self._medians[low] * (1 - part) + self._medians[high] * part

    def worst(self, rows: int) -> float:
        """What a step takes at most: no row more can take longer than a plain step of its own."""
        if rows in self._medians:
            return self._medians[rows]
        low, high = self._beside(rows)
        if high is not None:
            return max(
                self._medians[low], min(self._medians[high], self._medians[low] + self._more(rows - low))
            )
        if self._before is not None:
            ratio = self._before.worst(rows) / self._before.worst(low)
            return self._medians[low] * ratio
        return self._medians[low] + self._more(rows - low)

    def _more(self, rows: int) -> float:
        """The most that `rows` rows more can take: what they would take in plain steps of their own."""
        return -(-rows // self.requests) * self.plain

    def _shape(self, rows: int) -> float:
        if self._before is not None:
            return self._before.expected(rows)
        if rows not in self._estimates:
            self._estimates[rows] = self._estimate(rows)
        return self._estimates[rows]

    def _beside(self, rows: int) -> tuple[int, int | None]:
        """The numbers of rows that were measured around `rows`; plain steps always are."""
        lower = max(n for n in self._medians if n < rows)
        return lower, min((n for n in self._medians if n > rows), default=None)
