"""What the forecast policy learns: how often experts are used, what follows what, and what to make of it.

All layers of a token are taken in at once: numpy's cost per call would otherwise be paid for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.memory.experts import ExpertSpace

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

HALF_LIVES = np.array([0.5, 4.0, 16.0, 64.0, 256.0, 2048.0])
"""In steps of a layer. 0.5: little more than the last step. The constants are the same for every model."""
FEATURES = len(HALF_LIVES) + 1
DOUBT_STEPS = 32.0
"""A frequency is held back as if this many steps of uniform routing had come first: step n moves it by
1 / (n + doubt) until that is less than its half-life's own rate."""
FOLLOW_DISCOUNT = 0.7
"""What follows counts less by this factor per step of distance."""
FOLLOW_DOUBT, FOLLOW_RATE = 8.0, 0.01
"""Step size when learning what follows an expert: 1 / (mean uses of an expert + doubt), at least the rate."""

_GAIN = (1 - 0.5 ** (1 / HALF_LIVES)).astype(np.float32)[:, None]


@dataclass(frozen=True)
class Accesses:
    """What several routers chose. rows: one per router, all different; chosen: their experts in a line.

    counts `[rows]`: how many each chose, at least one.
    """

    rows: Indices
    chosen: Indices
    counts: Indices

    @property
    def owners(self) -> Indices:
        """Row of each chosen expert."""
        return self.rows.repeat(self.counts)

    @property
    def places(self) -> Indices:
        """Position in `rows` of the router that chose each expert."""
        return np.arange(len(self.rows)).repeat(self.counts)


class RoutingHistory:
    """Running statistics of all layers that route. All frequencies are deviations from uniform routing.

    A layer with experts has a row; rows are as wide as the widest layer, and padding stays 0. Memory: 4 bytes
    times layers times experts ** 2: 50 MB for 48 layers of 512.
    """

    def __init__(self, space: ExpertSpace) -> None:
        per_layer = [count for count in space.per_layer if count]
        layers, width = len(per_layer), max(per_layer, default=0)
        self._experts = np.array(per_layer, np.float32)
        self._real = (np.arange(width) < self._experts[:, None]).astype(np.float32)
        # Frequencies by half-life, then what follows the last step.
        self._features = np.zeros((FEATURES, layers, width), np.float32)
        self._steps = np.zeros(layers, np.float32)
        self._follow = np.zeros((layers, width, width), np.float32)  # what comes after an expert
        self._routed = np.zeros(layers, np.float32)  # mean uses per expert
        self._last: list[Indices] = [np.zeros(0, np.intp)] * layers

    def seed(self, row: int, shares: Floats, steps: float) -> None:
        """Long-run frequencies `[experts]` of earlier runs, worth `steps` steps. Before the first access."""
        self._features[-2, row, : len(shares)] = shares - shares.mean()
        self._steps[row] = steps

    def observe(self, accesses: Accesses) -> Floats:
        """Take in one step of some layers. Returns its deviations from uniform `[rows, width]`."""
        rows = self._select(accesses.rows)
        now: Floats = self._real[rows] * -self.uniform(accesses)[:, None]
        now[accesses.places, accesses.chosen] += 1.0
        self._steps[rows] += 1
        rates = np.maximum(_GAIN, 1 / (self._steps[rows] + DOUBT_STEPS), dtype=np.float32)
        change = now - self._features[:-1, rows]
        change *= rates[:, :, None]
        self._features[:-1, rows] += change
        self._routed[rows] += self.uniform(accesses)
        self._learn_what_follows(accesses, now)
        return now

    def features(self, rows: Indices) -> Floats:
        """Frequencies by half-life and what follows: a copy, `[FEATURES, rows, width]`."""
        return self._features[:, rows]

    def forecast(self, rows: Indices, weights: NDArray[np.float64]) -> Floats:
        """`weights` applied to the features: `[rows, width]`, as a deviation from uniform routing."""
        features = self._features[:, self._select(rows)]
        return np.tensordot(weights.astype(np.float32), features, axes=1)

    def uniform(self, accesses: Accesses) -> Floats:
        """Uniform frequencies `[rows]` at this number of chosen experts."""
        return (accesses.counts / self._experts[accesses.rows]).astype(np.float32)

    def _select(self, rows: Indices) -> Indices | slice:
        """An index for `rows`; a step of all layers needs no copies."""
        whole = len(rows) == len(self._last) and bool((rows[1:] > rows[:-1]).all())
        return slice(None) if whole else rows

    def _learn_what_follows(self, accesses: Accesses, now: Floats) -> None:
        """Discounted uses beyond the long-run frequency that followed each expert so far.

        Temporal-difference learning of successor frequencies: an expert's entry moves towards what came now
        plus what is expected to come after that.
        """
        rows, counts = accesses.rows, accesses.counts
        ends = counts.cumsum()
        expected = np.add.reduceat(self._follow[accesses.owners, accesses.chosen], ends - counts, axis=0)
        expected /= counts[:, None].astype(np.float32)
        target = (1 - FOLLOW_DISCOUNT) * (now - self._features[-2, rows]) + FOLLOW_DISCOUNT * expected
        rates = np.maximum(1 / (self._routed[rows] + FOLLOW_DOUBT), FOLLOW_RATE, dtype=np.float32)
        self._move_followers(rows, target, rates)
        self._features[-1, rows] = expected
        for row, chosen in zip(rows.tolist(), np.split(accesses.chosen, ends[:-1]), strict=True):
            self._last[row] = chosen

    def _move_followers(self, rows: Indices, target: Floats, rates: Floats) -> None:
        """Move the entries of the experts of each row's previous step towards its target."""
        last = [self._last[row] for row in rows.tolist()]
        counts = np.array([len(chosen) for chosen in last])
        owners, chosen = rows.repeat(counts), np.concatenate(last)
        entries = self._follow[owners, chosen]
        step = target.repeat(counts, axis=0)
        step -= entries
        step *= rates.repeat(counts)[:, None]
        entries += step
        self._follow[owners, chosen] = entries


class ValueWeights:
    """Linear weights of the features, for all layers alike, by least-squares temporal differences (LSTD).

    The value of an expert is the mean of its future uses, discounted by `discount` per step, normalised to a
    frequency. Source of the method: S. Bradtke and A. Barto, Machine Learning 22 (1996).
    """

    HALF_LIFE = 2000
    """In steps of a layer that were learned from."""
    RIDGE = 0.1
    """How firmly the first guess is held, in squared feature units; it is gone after some hundred steps."""
    SOLVE_EVERY = 16

    def __init__(self) -> None:
        # First guess: the long-run frequency plus what usually follows.
        self._guess = np.zeros(FEATURES)
        self._guess[-2:] = 1.0
        self._left = np.zeros((FEATURES, FEATURES))
        self._right = np.zeros(FEATURES)
        self._unsolved = 0
        self.weights: NDArray[np.float64] = self._guess

    def learn(self, before: Floats, after: Floats, now: Floats, uniform: Floats, discount: float) -> None:
        """Features `[FEATURES, rows, width]` before and after a step, its uses `[rows, width]` and `uniform`.

        Experts count less the farther they are from the uniform frequency `[rows]`: those near it are the
        ones that a cache has to decide on, and squared errors would be ruled by the hottest. Measured: +1.0
        point of hits where popularity drifts, nothing lost elsewhere.
        """
        keep = 0.5 ** (len(now) / self.HALF_LIFE)
        flat = before.reshape(FEATURES, -1)
        change = flat - np.float32(discount) * after.reshape(FEATURES, -1)
        counted = flat / (1 + (before[-2] / uniform[:, None]).ravel() ** 2)
        self._left = keep * self._left + counted @ change.T
        self._right = keep * self._right + (1 - discount) * (counted @ now.ravel())
        self._unsolved += len(now)
        if self._unsolved >= self.SOLVE_EVERY:
            self._unsolved = 0
            self._solve()

    def _solve(self) -> None:
        ridge = self.RIDGE * np.eye(FEATURES)
        try:
            weights = np.linalg.solve(self._left + ridge, self._right + self.RIDGE * self._guess)
        except np.linalg.LinAlgError:
            return  # features that cannot be told apart yet: the old weights stay
        if np.isfinite(weights).all():
            self.weights = weights.astype(np.float64)


def accesses_of(batch: Sequence[tuple[int, Sequence[int]]]) -> Accesses:
    """Of (row, its experts), one or more, with different rows."""
    rows = np.array([row for row, _ in batch], np.intp)
    counts = np.array([len(experts) for _, experts in batch], np.intp)
    return Accesses(rows, np.array([index for _, experts in batch for index in experts], np.intp), counts)
