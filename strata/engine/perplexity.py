"""How well a model foresees a text, and how far its predictions are from another's on the same text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.core import PAGE_TOKENS, Batch, KvDtype
from strata.model.decoder import Decoder

CHUNK = 128
"""Tokens per forward pass: 128 rows of 151,936 logits are 78 MB."""
_ROWS = 16
"""Rows whose probabilities are in memory at once: 16 rows of 151,936 in f64 are 19 MB, and there are five."""


class Predictions(NamedTuple):
    """Logits f32 `[n, vocab]` after n tokens of a text, and the tokens i64 `[n]` that really follow."""

    logits: NDArray[np.float32]
    following: NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    """losses: f64 `[n]`, the negative natural logarithm of what the model gave each token that came."""

    losses: NDArray[np.float64]

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(float(self.losses.mean()))

    @property
    def standard_error(self) -> float:
        """Of the perplexity, tokens taken as independent."""
        return self.perplexity * _mean_error(self.losses)


@dataclass(frozen=True)
class Comparison:
    """A model beside a reference on the same text, token by token.

    divergences: f64 `[n]`, Kullback-Leibler from the reference's distribution to this one, in nats.
    same_top: bool `[n]`, whether both find the same token likeliest.
    """

    reference: Score
    score: Score
    divergences: NDArray[np.float64]
    same_top: NDArray[np.bool_]

    @property
    def change(self) -> float:
        """Of the perplexity: 0.003 is 0.3 % more than the reference's."""
        return math.expm1(float(self._differences.mean()))

    @property
    def change_error(self) -> float:
        """Standard error of `change`. Paired: both models meet the same hard and easy tokens."""
        return (1 + self.change) * _mean_error(self._differences)

    @property
    def agreement(self) -> float:
        """Share of tokens where both find the same token likeliest."""
        return float(self.same_top.mean())

    @property
    def divergence(self) -> float:
        """Mean Kullback-Leibler divergence in nats."""
        return float(self.divergences.mean())

    @property
    def divergence_error(self) -> float:
        """Standard error of `divergence`, tokens taken as independent."""
        return _mean_error(self.divergences)

    def divergence_at(self, share: float) -> float:
        """The divergence that this share of the tokens does not exceed, interpolated: 0.5 is the median."""
        return float(np.quantile(self.divergences, share))

    @property
    def _differences(self) -> NDArray[np.float64]:
        return self.score.losses - self.reference.losses


def split_windows(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Consecutive windows of `length` tokens; the last one is shorter, and dropped below two tokens."""
    cut = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [window for window in cut if len(window) > 1]


def predictions(
    decoder: Decoder,
    windows: Sequence[Sequence[int]],
    kv_dtype: KvDtype,
    *,
    chunk: int = CHUNK,
    page_tokens: int = PAGE_TOKENS,
    cache: Any = None,
    second_half: bool = False,
) -> Iterator[Predictions]:
    """What the decoder expects after every token of every window but the last, each window on its own.

    chunk: tokens per forward pass; 1 computes everything as decoding does, token by token. cache: the
    backend's, of this dtype and these pages, instead of a new one; what is in it is overwritten.
    second_half: only after tokens from the middle of their window on (n // 2, as llama-perplexity has it), so
    that each is foreseen from at least half a window.
    """
    pages = np.arange(-(-max(map(len, windows), default=0) // page_tokens), dtype=np.int32)
    if cache is None:
        cache = decoder.backend.kv_cache(KvSpec.of(decoder.spec, page_tokens, kv_dtype), len(pages))
    for window in windows:
        tokens = np.asarray(window, dtype=np.int32)
        first = len(tokens) // 2 if second_half else 0
        for start in range(0, len(tokens) - 1, chunk):
            part = tokens[start : min(start + chunk, len(tokens) - 1)]
            rows = np.arange(len(part), dtype=np.int32)
            wanted = rows[max(0, first - start) :]
            batch = Batch.single(part, rows + np.int32(start), pages, wanted)
            found = decoder.forward(batch, cache)
            if found is not None:
                # A copy, because callers keep several: the decoder's own are overwritten by the next pass.
                logits = decoder.backend.to_numpy(found).copy()
                yield Predictions(logits, tokens[start + 1 + wanted].astype(np.int64))


def score(parts: Iterable[Predictions]) -> Score:
    """The losses of a text's tokens."""
    return Score(
        np.concatenate(
            [
                _losses(_log_softmax(part.logits[rows]), part.following[rows])
                for part in parts
                for rows in _blocks(len(part.following))
            ]
        )
    )


def compare(
    reference: Iterable[Predictions], others: Mapping[str, Iterable[Predictions]]
) -> dict[str, Comparison]:
    """Each of `others` beside the reference; all must walk the same windows in the same chunks.

    Walks them side by side, so that one chunk's logits are in memory and not a text's.
    """
    losses: list[NDArray[np.float64]] = []
    found: dict[str, list[_Found]] = {name: [] for name in others}
    for part, *rest in zip(reference, *others.values(), strict=True):
        for rows in _blocks(len(part.following)):
            truth = _log_softmax(part.logits[rows])
            losses.append(_losses(truth, part.following[rows]))
            for name, other in zip(others, rest, strict=True):
                found[name].append(_beside(truth, other.logits[rows], other.following[rows]))
    base = Score(np.concatenate(losses))
    return {name: _comparison(base, parts) for name, parts in found.items()}


class _Found(NamedTuple):
    """Of some rows: see Comparison."""

    losses: NDArray[np.float64]
    divergences: NDArray[np.float64]
    same_top: NDArray[np.bool_]


def _beside(truth: NDArray[np.float64], logits: NDArray[np.float32], following: NDArray[np.int64]) -> _Found:
    guess = _log_softmax(logits)
    divergence = (np.exp(truth) * (truth - guess)).sum(axis=1)
    return _Found(_losses(guess, following), divergence, truth.argmax(axis=1) == guess.argmax(axis=1))


def _comparison(reference: Score, parts: list[_Found]) -> Comparison:
    losses, divergences, same = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Comparison(reference, Score(losses), divergences, same)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, count, _ROWS))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """f64: differences of a thousandth between two models are what is looked for."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _losses(log_probabilities: NDArray[np.float64], following: NDArray[np.int64]) -> NDArray[np.float64]:
    losses: NDArray[np.float64] = -log_probabilities[np.arange(len(following)), following]
    return losses


def _mean_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean; NaN of a single value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
