"""How long steps take by the rows they compute: measured, and estimated where nothing was measured yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol


class Estimate(Protocol):
    """What a step is thought to take (`plan.cost`). Only ratios are used."""

    def __call__(self, rows: int, *, requests: int, depth: int) -> float:
        """Seconds of `rows` rows of `requests` requests with `depth` tokens of context each."""
        ...


KEPT = 8
"""Latest times of a step that count, of which the fastest quarter says what it takes: what disturbs steps
only makes them longer, on a shared machine of two cores threefold."""
PLAIN_TIMES = 3
"""Plain steps that are measured before anything is compared with them; and times of any step that are
believed even where they say that it takes far longer than its neighbours."""
LEAST_GAIN = 1.01
"""Expected gain below which a step stays plain: times are not known better than that."""
STALE = 0.95
"""Of a plain step: when a step with drafts takes less, plain ones were measured in a slower time."""
CHANGE = 0.01
"""Of a step's time, from which on all is fitted anew, which takes a twentieth of the fastest model's step."""
HOPE = 1.25
"""A row takes at most twice what rows before it took on average (`_limit`), and where it is only to be tried,
so many times: most take less than those before them, and a step that is thought dear because it was disturbed
is not measured again."""
LEAST_ROW = 1 / 16
"""Of a plain step: what a row before it is thought to take at least, when that is said of the next ones."""


def usual(times: Sequence[float]) -> float:
    """What it takes: as the fastest quarter of the latest times says, which disturbances only make longer."""
    return sorted(times)[len(times) // 4]


class StepTimes:
    """Times of decoding steps, apart for each number of requests and each doubling of their context."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._tables: dict[tuple[int, int], StepTable] = {}
        self._latest: dict[int, StepTable] = {}

    def add_plain(self, requests: int, seconds: float) -> None:
        """A plain step was measured where no step was yet."""
        latest = self._latest.get(requests)
        if latest is not None and not latest.known:
            latest.add(requests, seconds)

    def table(self, requests: int, tokens: int) -> StepTable:
        """For `requests` requests with `tokens` tokens of context together."""
        key = requests, tokens.bit_length()
        found, latest = self._tables.get(key), self._latest.get(requests)
        if found is None or (not found.known and latest is not None and latest.known):
            estimate = partial(self._estimate, requests=requests, depth=tokens // requests)
            found = self._tables[key] = StepTable(requests, estimate, latest)
        self._latest[requests] = found
        return found


class StepTable:
    """before: of the same number of requests: what was measured there holds until it is measured here.

    Times are kept as parts of a plain step's, which change little with the context.
    """

    def __init__(
        self, requests: int, estimate: Callable[[int], float], before: StepTable | None = None
    ) -> None:
        self.requests = requests
        self.stale = False
        self._estimate = estimate
        self._estimates: dict[int, float] = {} if before is None else before._estimates
        self._times: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._fitted: dict[int, float] = {}
        self._expected: dict[int, float] = {}
        self._plain_before: float | None = None
        self._before: dict[int, float] = {}
        # One for all contexts: what a step took at most was a part of a plain one, which changes little.
        self._bounds: dict[int, float] = {} if before is None else before._bounds
        if before is not None and before.known:
            self._plain_before = before.plain
            self._before = dict(zip(before._rows, before._ratios, strict=True))
        self._rows: list[int] = [requests]
        self._ratios: list[float] = [1.0]
        self._hoped: list[float] = [1.0]
        if self._before:
            self._fit()

    @property
    def known(self) -> bool:
        """Whether plain steps were measured."""
        return self._plain_before is not None or self._count(self.requests) >= PLAIN_TIMES

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts. One time that is longer than those with less context is not
        believed: it was disturbed as likely as not."""
        own, before = self._seconds.get(self.requests), self._plain_before
        if own is None:
            assert before is not None, "nothing is known"
            return before
        return own if before is None or self._count(self.requests) >= PLAIN_TIMES else min(own, before)

    def add(self, rows: int, seconds: float) -> None:
        """A step was measured."""
        times = self._times.setdefault(rows, deque(maxlen=KEPT))
        if rows > self.requests:
            self.stale = self.stale or (self.known and seconds < STALE * self.plain)
        elif self.stale:
            times.clear()
            self.stale = False
        times.append(seconds)
        now = self._seconds[rows] = usual(times)
        before = self._fitted.get(rows, 0.0)
        if self.known and (abs(now - before) > CHANGE * before or len(times) == PLAIN_TIMES):
            self._fit()

    def doubt(self) -> None:
        """Forget times that were measured too seldom to be believed: they may be why nothing is tried. That a
        step does not take longer is remembered: what disturbs it makes it longer only."""
        for rows, ratio in zip(self._rows[1:], self._ratios[1:], strict=True):
            self._bounds[rows] = min(ratio, self._bounds.get(rows, ratio))
        self._before = {}
        for rows in [rows for rows in self._times if self._count(rows) < PLAIN_TIMES]:
            if rows != self.requests:
                del self._times[rows], self._seconds[rows]
        self._fit()

    def expected(self, rows: int) -> float:
        """Plain steps that a step takes: measured, else between what was measured, else by the estimate."""
        found = self._expected.get(rows)
        if found is None:
            found = self._expected[rows] = self._guess(rows)
        return found

    def worst(self, rows: int) -> float:
        """What it takes, where it was measured; else at most: no more than what more rows took, nor than what
        fewer took allows. Before any draft was measured, a row takes a plain step at most."""
        place = bisect_left(self._rows, rows)
        if place < len(self._rows) and self._rows[place] == rows:
            return self._ratios[place]
        most = self._limit(self._rows[place - 1], self._ratios[place - 1], rows)
        if place < len(self._rows):
            most = min(most, self._ratios[place])
        for bounded, ratio in self._bounds.items():
            if bounded >= rows and ratio < most:
                most = ratio
        return most

    def _guess(self, rows: int) -> float:
        place = bisect_left(self._rows, rows)
        if place < len(self._rows):
            high, most = self._rows[place], self._hoped[place]
            if high == rows:
                return most
            low, least = self._rows[place - 1], self._hoped[place - 1]
            return least + (most - least) * (rows - low) / (high - low)
        last = self._rows[-1]
        return max(self._hoped[-1], self._hoped[-1] * self._shape(rows) / self._shape(last))

    def _limit(self, rows: int, ratio: float, more: int) -> float:
        """What a step of `more` rows takes at most when one of `rows` takes `ratio`: never more than the
        rows between in plain steps of their own."""
        own = -(-(more - rows) // self.requests)
        if rows == self.requests:
            return ratio + own
        drafted, all_drafted = rows - self.requests, more - self.requests
        taken = max(LEAST_ROW * drafted, ratio - 1)
        # Each row takes twice the average before it, of which it is a part for the next one.
        growth = all_drafted * (all_drafted + 1) / (drafted * (drafted + 1)) - 1
        return ratio + min(own, taken * growth)

    def _fit(self) -> None:
        """Bring what is known in order: more rows never take less, and no single time is believed that
        says they take far more: other programs disturb steps."""
        plain = self.plain
        self._fitted = dict(self._seconds)
        self._expected.clear()
        ratios = {**self._before, **{rows: time / plain for rows, time in self._seconds.items()}}
        ratios[self.requests] = 1.0
        self._rows = sorted(ratios)
        found = [ratios[rows] for rows in self._rows]
        self._ratios = self._hoped = found
        seldom = [self._count(rows) < PLAIN_TIMES for rows in self._rows]
        if any(seldom[1:]):
            self._ratios = self._believed(found, seldom, self._limit)
            self._hoped = self._believed(found, seldom, self._hope)
        self._ratios = _rising(self._ratios)
        self._hoped = _rising(self._hoped)

    def _believed(
        self, ratios: Sequence[float], seldom: Sequence[bool], most: Callable[[int, float, int], float]
    ) -> list[float]:
        """What was measured too seldom is no more than `most` of the rows before it says."""
        found = [1.0]
        for place in range(1, len(ratios)):
            ratio = ratios[place]
            if seldom[place]:
                ratio = min(ratio, most(self._rows[place - 1], found[-1], self._rows[place]))
            found.append(ratio)
        return found

    def _hope(self, rows: int, ratio: float, more: int) -> float:
        """What lets a step of `more` rows be tried again although it took longer."""
        if rows == self.requests:
            return ratio + (more - rows) / self.requests
        each = max(LEAST_ROW, (ratio - 1) / (rows - self.requests))
        return ratio + (more - rows) * HOPE * each

    def _count(self, rows: int) -> int:
        return len(self._times.get(rows, ()))

    def _shape(self, rows: int) -> float:
        if rows not in self._estimates:
            self._estimates[rows] = self._estimate(rows)
        return self._estimates[rows]


def _rising(ratios: Sequence[float]) -> list[float]:
    """None above a later one, none below 1."""
    found, least = list(ratios), ratios[-1]
    for place in range(len(found) - 1, -1, -1):
        if found[place] < least:
            least = found[place]
        found[place] = max(1.0, least)
    return found
