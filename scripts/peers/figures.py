"""Ratios of runs in pairs, apart for the states between which a machine's memory bandwidth flips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Literal

State = Literal["all", "fast", "slow", "mixed"]
_STATES: tuple[State, ...] = ("all", "fast", "slow", "mixed")
_GAP = 1.2
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Sample:
    """One run of one engine. before, after: bytes/s that our threads read from memory around it.

    share: of the bandwidth, by the engine's own account; None from engines without one. others: CPUs that
    other processes had meanwhile, on average.
    """

    tokens_per_second: float
    before: float
    after: float
    share: float | None = None
    others: float = 0.0


@dataclass(frozen=True)
class Pair:
    """Two runs, one right after the other. version: of Strata's kernels, "" where nobody noted it."""

    peer: Sample
    ours: Sample
    version: str = ""

    @property
    def ratio(self) -> float:
        """Above 1: Strata is faster."""
        return self.ours.tokens_per_second / self.peer.tokens_per_second

    @property
    def others(self) -> float:
        """CPUs that other processes had during the run that they disturbed more."""
        return max(self.peer.others, self.ours.others)

    @property
    def probes(self) -> tuple[float, ...]:
        """Bytes/s around both runs."""
        return (self.peer.before, self.peer.after, self.ours.before, self.ours.after)


@dataclass(frozen=True)
class Ratios:
    """The pairs of one state: their ratios, and both engines' median tokens/s."""

    state: State
    pairs: int
    low: float
    median: float
    high: float
    peer: float
    ours: float
    share: float | None


def two_states(probes: Iterable[float]) -> float | None:
    """The bytes/s between a fast and a slow state; None where only one shows.

    Two states: the widest gap between neighbouring probes is a factor of 1.2 or more, and at least two probes
    and a tenth of all lie on either side, so that a single disturbed probe makes no state.
    """
    ordered = sorted(probes)
    least = max(2, round(len(ordered) * _LEAST_SHARE))
    gaps = [(ordered[i] / ordered[i - 1], i) for i in range(least, len(ordered) - least + 1)]
    if not gaps or max(gaps)[0] < _GAP:
        return None
    at = max(gaps)[1]
    return sqrt(ordered[at - 1] * ordered[at])


def state_of(pair: Pair, threshold: float | None) -> State:
    """ "mixed" when the bandwidth changed within the pair."""
    if threshold is None:
        return "all"
    fast = [probe >= threshold for probe in pair.probes]
    if all(fast):
        return "fast"
    return "mixed" if any(fast) else "slow"


def ratios(pairs: Sequence[Pair], threshold: float | None) -> list[Ratios]:
    """One entry per state that shows among the pairs."""
    found = {state: [pair for pair in pairs if state_of(pair, threshold) == state] for state in _STATES}
    return [_ratios(state, chosen) for state, chosen in found.items() if chosen]


def _ratios(state: State, pairs: Sequence[Pair]) -> Ratios:
    each = [pair.ratio for pair in pairs]
    shares = [pair.ours.share for pair in pairs if pair.ours.share is not None]
    return Ratios(
        state,
        len(pairs),
        min(each),
        median(each),
        max(each),
        median(pair.peer.tokens_per_second for pair in pairs),
        median(pair.ours.tokens_per_second for pair in pairs),
        median(shares) if shares else None,
    )
