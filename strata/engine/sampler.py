"""The next token out of logits: llama.cpp's stages, names and order.

bias -> constraint -> penalties -> top_k -> top_p -> min_p -> temperature -> draw. Candidates stay sorted by
logit, best first, the lowest id first among equals. Each request has its own random numbers and draws exactly
one per token, so that a seed gives the same text whatever else the batch holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import NO_MIN_P, Drawing
from strata.core import Constraint, SamplingParams, TokenLogprob
from strata.engine.best_rows import BestRow, Row
from strata.errors import NumericalError

COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures between which a device may draw: its weights are f32."""
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


@dataclass(frozen=True)
class Candidates:
    """Token ids and their logits f64, best first."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]

    def first(self, count: int) -> Candidates:
        """The `count` best; never fewer than one."""
        return Candidates(self.ids[: max(count, 1)], self.logits[: max(count, 1)])

    def probabilities(self, temperature: float = 1.0) -> NDArray[np.float64]:
        """softmax(logits / temperature). The maximum is taken off first: 1e-9 must not overflow."""
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((self.logits - self.logits[0]) / temperature)
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares


class Sampler:
    """Chooses one request's tokens. valid_tokens: ids from there on are padding and never chosen."""

    def __init__(
        self,
        params: SamplingParams,
        valid_tokens: int,
        banned: Iterable[int] = (),
        bias: Mapping[int, float] | None = None,
        constraint: Constraint | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """banned: ids that are never chosen (the stop ids under ignore_eos). A negative seed is no seed.

        bias: added to the logits of these ids, which must be below valid_tokens. constraint: asked about what
        follows the first prompt_tokens tokens.
        """
        self.params = params
        self.constraint = constraint
        self.prompt_tokens = prompt_tokens
        self.valid_tokens = valid_tokens
        self.banned = np.array(sorted(id_ for id_ in banned if 0 <= id_ < valid_tokens), dtype=np.int64)
        self.biased = np.array(list(bias or ()), dtype=np.int64)
        self.bias = np.array(list((bias or {}).values()), dtype=np.float32)
        seed = params.seed if params.seed is not None and params.seed >= 0 else None
        self.random = np.random.Generator(np.random.Philox(seed))

    @property
    def enough(self) -> int | None:
        """How many of the best logits `sample` needs at most; None: all of them."""
        params = self.params
        if self.constraint is not None or len(self.biased) or not is_neutral(params):
            return None
        wanted = 1 if params.temperature == 0.0 else params.top_k
        best = wanted + len(self.banned)
        return best if wanted > 0 and best < self.valid_tokens else None

    def drawing(self, count: int) -> Drawing | None:
        """For a device that chooses the next `count` tokens in the stead of `sample`, from the `enough` best
        logits of each row; `drawn` must then be called. None: only `sample` can."""
        params = self.params
        if self.enough is None or len(self.banned):
            return None
        if params.temperature == 0.0:
            return Drawing(0.0, 1.0, NO_MIN_P, 1, self.ahead(count))
        if not COLDEST <= params.temperature <= HOTTEST:
            return None
        least = float(np.log(params.min_p)) if params.min_p > 0 else NO_MIN_P
        top_p = params.top_p if params.top_p >= 1 else min(params.top_p, BELOW_ONE)
        return Drawing(1 / params.temperature, top_p, least, params.top_k, self.ahead(count))

    def drawn(self, count: int) -> None:
        """So many tokens were chosen by `drawing`: their random numbers are spent."""
        if self.params.temperature != 0.0:
            self.random.random(count)

    def sample(self, logits: Row, tokens: Sequence[int]) -> int:
        """One id. logits: f32 `[vocab]`, or its best (`enough` of them at least); tokens: prompt and answer
        before the id's position.

        Raises what `scores` raises.
        """
        if isinstance(logits, BestRow):
            return self._sample_best(logits)
        scores = self.scores(logits, tokens)
        if self.params.temperature == 0.0:
            return int(scores.argmax())
        return self._draw(scores, self.random.random())

    def ahead(self, count: int) -> list[float]:
        """The random numbers of the next `count` tokens, which stay the next ones."""
        if self.params.temperature == 0.0:
            return [0.0] * count
        state = self.random.bit_generator.state
        numbers: list[float] = self.random.random(count).tolist()
        self.random.bit_generator.state = state
        return numbers

    def guess(self, logits: NDArray[np.float32], tokens: Sequence[int], number: float) -> int:
        """What `sample` would choose with this random number; the sampler stays as it is."""
        scores = self.scores(logits, tokens)
        return int(scores.argmax()) if self.params.temperature == 0.0 else self._draw(scores, number)

    def scores(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after bias, constraint and penalties, f32 `[valid_tokens]`; -inf where an id is impossible.

        Does not change the sampler, so that positions of a draft may be asked about in any order.
        Raises NumericalError for NaN or +Inf among the valid logits, or when no token is possible.
        """
        scores = logits[: self.valid_tokens]
        if len(self.banned) or len(self.biased):
            scores = scores.copy()
            scores[self.biased] += self.bias
            scores[self.banned] = -np.inf
        _check(scores)
        if self.constraint is not None:
            allowed = self.constraint.allowed(list(tokens[self.prompt_tokens :]))
            scores = np.where(allowed[: len(scores)], scores, np.float32(-np.inf))
            _check(scores)
        return penalized(scores, tokens, self.params)

    def _sample_best(self, row: BestRow) -> int:
        """What the whole row would have given."""
        if self.params.temperature == 0.0 and not len(self.banned):
            return int(row.ids[0])
        allowed = ~np.isin(row.ids, self.banned)
        candidates = Candidates(row.ids[allowed].astype(np.int64), row.values[allowed].astype(np.float64))
        if self.params.temperature == 0.0:
            return int(candidates.ids[0])
        return self._choose(candidates.first(self.params.top_k), self.random.random())

    def _draw(self, scores: NDArray[np.float32], number: float) -> int:
        return self._choose(top_k(scores, self.params.top_k), number)

    def _choose(self, candidates: Candidates, number: float) -> int:
        params = self.params
        candidates = top_p(candidates, params.top_p)
        candidates = min_p(candidates, params.min_p)
        cumulated = np.cumsum(candidates.probabilities(params.temperature))
        place = np.searchsorted(cumulated, number * cumulated[-1], side="right")
        # The product may round up to the total: it then belongs to the last candidate with a chance.
        last_possible = np.searchsorted(cumulated, cumulated[-1], side="left")
        return int(candidates.ids[min(place, last_possible)])


def _check(scores: NDArray[np.float32]) -> None:
    best = float(scores.max())
    if not np.isfinite(best):
        raise NumericalError(
            f"the best of {len(scores)} logits is {best}: no token can be chosen",
            remedy="check the store with `strata verify`; other requests are not affected",
        )


def is_neutral(params: SamplingParams) -> bool:
    """Whether no penalty changes a logit."""
    penalties = params.repeat_penalty, params.presence_penalty, params.frequency_penalty
    return penalties == (1.0, 0.0, 0.0) or params.repeat_last_n == 0


def penalized(
    scores: NDArray[np.float32], tokens: Sequence[int], params: SamplingParams
) -> NDArray[np.float32]:
    """Logits lowered for ids among the last `repeat_last_n` tokens (-1: all); the argument is left alone."""
    if is_neutral(params):
        return scores
    recent = tokens if params.repeat_last_n < 0 else tokens[-params.repeat_last_n :]
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    known = ids < len(scores)
    ids, counts = ids[known], counts[known]
    seen = scores[ids].astype(np.float64)
    with np.errstate(over="ignore"):
        changed = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    changed -= counts * params.frequency_penalty + params.presence_penalty
    # Extreme penalties saturate: what was possible stays possible, and no infinity reaches the softmax.
    largest = float(np.finfo(np.float32).max)
    result = scores.copy()
    result[ids] = np.where(np.isneginf(seen), seen, changed.clip(-largest, largest))
    return result


def token_logprob(scores: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """The token's log-probability among all of `scores`, and the `count` likeliest tokens' beside it.

    f64: a sum of 150,000 f32 terms would be off in the fourth place.
    """
    best = float(scores.max())
    total = best + float(np.log(np.exp(scores.astype(np.float64) - best).sum()))
    likeliest = top_k(scores, count).ids if count else ()
    top = tuple((int(index), float(scores[index]) - total) for index in likeliest)
    return TokenLogprob(float(scores[token]) - total, top)


def top_k(scores: NDArray[np.float32], k: int) -> Candidates:
    """The k best ids; k below 1 or above the vocabulary keeps all."""
    if 0 < k < len(scores):
        # Partitioning 150,000 logits takes 0.1 ms, sorting them 3. Every id that ties with the k-th best
        # stays in until the sort has put the lowest ids first.
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        if np.isneginf(threshold):
            # A constraint makes impossible ids by the hundred thousand: the lowest of them fill up, unsorted.
            possible = np.flatnonzero(scores > threshold)
            ids = np.append(possible, np.flatnonzero(scores == threshold)[: k - len(possible)])
        else:
            ids = np.flatnonzero(scores >= threshold)
    else:
        k, ids = len(scores), np.arange(len(scores))
    ids = ids[best_first(scores[ids])[:k]]
    return Candidates(ids, scores[ids].astype(np.float64))


def best_first(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Indices by descending score, the lowest first among equals.

    Sorts 64-bit keys, the score's bits above the index: numpy sorts those with SIMD, which took 3 ms for
    150,000 logits where a stable argsort took 30.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # -0 becomes +0: they are equal
    descending = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = descending.astype(np.uint64) << np.uint64(32) | np.arange(len(scores), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest best candidates whose probabilities reach p together; at least one."""
    if p >= 1.0:
        return candidates
    return candidates.first(int(np.searchsorted(np.cumsum(candidates.probabilities()), p)) + 1)


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Candidates at least p times as probable as the best one."""
    if p <= 0.0:
        return candidates
    return candidates.first(int((candidates.logits >= candidates.logits[0] + np.log(p)).sum()))
