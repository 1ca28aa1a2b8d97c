"""The same batch through two models, layer by layer: where does one leave the other?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.parts import Array, RoutedFfn
from strata.core import Batch
from strata.engine.engine import Engine

F32 = NDArray[np.float32]
JUMP = 4.0
"""A layer whose error is so many times the median layer's is marked. In the demo model (w4g64, w4g128, w8)
the largest is 1.3 times the median."""
FLOOR = 1e-3
"""What no layer is marked below: rounding in other orders is smaller."""


@dataclass(frozen=True)
class LayerErrors:
    """How far a model is from its reference behind one layer, both run from the same tokens.

    max_abs: largest difference of the hidden state, largest: largest magnitude of the reference's, cosine:
    mean over the rows, worst_cosine: of the row that is farthest off. relative: mean over the rows of
    |difference| / |reference|. own: what the layer itself adds to that: given the reference's input,
    |difference of the outputs| / |what the reference's layer adds to its input|, mean over the rows; None
    where a backend cannot be given an input (a device).
    routes: share of the chosen experts that are equal, logits: largest difference of the router's logits;
    None in layers that do not route (logits: on a device, too).
    """

    layer: int
    max_abs: float
    largest: float
    cosine: float
    worst_cosine: float
    relative: float
    own: float | None
    routes: float | None
    logits: float | None


class _Seen(NamedTuple):
    """Behind a layer: hidden f32 `[rows, hidden]`, expert ids i32 `[rows, top_k]`, router's logits."""

    hidden: F32
    routes: NDArray[np.int32] | None
    logits: F32 | None


class _Walk:
    """One pass of some tokens through an engine's decoder, stopped behind every layer."""

    def __init__(self, engine: Engine, batch: Batch, cache: Any) -> None:
        self._decoder = engine.decoder
        self._backend = engine.decoder.backend
        self._batch, self._cache = batch, cache

    @property
    def takes_input(self) -> bool:
        """Whether a layer can be given any hidden state: a device's arrays are its own."""
        return not hasattr(self._backend, "device")

    def begin(self) -> Array:
        """The embedded tokens."""
        decoder = self._decoder
        return self._backend.embedding(decoder.embed, self._batch.token_ids, decoder.spec.embedding_scale)

    def numbers(self, residual: Array) -> F32:
        """A copy."""
        return np.array(self._backend.to_numpy(residual))

    def given(self, hidden: F32) -> Array:
        """These numbers as the backend's own."""
        return self._backend.vector(hidden)

    def step(self, index: int, residual: Array) -> _Seen:
        """The residual through one layer, in place."""
        layer, ops = self._decoder.layers[index], self._backend
        if not self.takes_input or not isinstance(layer.ffn, RoutedFfn):
            routes = ops.run_layers(residual, (layer,), self._cache, self._batch)
            return _Seen(self.numbers(residual), routes.ids.get(0), None)
        ops.attend(residual, layer.attention, self._cache, self._batch)
        router = layer.ffn.router
        routing = ops.choose_experts(residual, router)
        logits = self.numbers(ops.plain_linear(routing.hidden, router.matrix, router.bias))
        ops.apply_experts(residual, routing, layer.ffn.experts)
        return _Seen(self.numbers(residual), np.array(routing.ids), logits)


def compare_layers(reference: Engine, other: Engine, tokens: Sequence[int]) -> Iterator[LayerErrors]:
    """Layer after layer, tokens as one batch from position 0 in the engines' KV pages, which must be free.

    Both have the same number of layers and the same vocabulary; the tokens fit the context of both. In memory
    are the hidden states behind one layer.
    """
    batches = [_batch(tokens, engine) for engine in (reference, other)]
    one = _Walk(reference, batches[0], reference.executor.cache)
    two = _Walk(other, batches[1], other.executor.cache)
    # The layer that gets the reference's input must not see its own model's keys and values.
    apart: _Walk | None = None
    if two.takes_input:
        pages = len(batches[1].sequences[0].pages)
        apart = _Walk(other, batches[1], other.decoder.backend.kv_cache(other.kv, pages))
    mine, theirs = one.begin(), two.begin()
    before = one.numbers(mine)
    for index in range(reference.decoder.spec.layers):
        expected, found = one.step(index, mine), two.step(index, theirs)
        own = None
        if apart is not None:
            alone = apart.step(index, apart.given(before)).hidden
            own = _relative(alone - expected.hidden, expected.hidden - before)
        yield _errors(index, expected, found, own)
        before = expected.hidden


def suspects(errors: Sequence[LayerErrors]) -> list[int]:
    """Layers where the error jumps: their own is above FLOOR and JUMP times the median layer's.

    One that is no number is a jump, too. Where own errors are unknown, see `own_errors`.
    """
    own = own_errors(errors)
    usual = median([error for error in own if isfinite(error)] or [0.0])
    limit = max(FLOOR, JUMP * usual)
    return [one.layer for one, error in zip(errors, own, strict=True) if not error <= limit]


def own_errors(errors: Sequence[LayerErrors]) -> list[float]:
    """What each layer adds: measured, or sqrt(relative^2 - the layer before's relative^2), as if the errors
    of layers were independent."""
    found, before = [], 0.0
    for one in errors:
        added = max(one.relative**2 - before**2, 0.0) ** 0.5  # in this order NaN stays NaN
        found.append(added if one.own is None else one.own)
        before = one.relative
    return found


def _batch(tokens: Sequence[int], engine: Engine) -> Batch:
    ids = np.asarray(tokens, dtype=np.int32)
    pages = np.arange(-(-len(ids) // engine.options.page_tokens), dtype=np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    return Batch.single(ids, rows, pages, rows[:0])


def _errors(layer: int, expected: _Seen, found: _Seen, own: float | None) -> LayerErrors:
    difference = found.hidden - expected.hidden
    cosines = _cosines(expected.hidden, found.hidden)
    routes = logits = None
    if expected.routes is not None and found.routes is not None:
        equal = (expected.routes[:, :, None] == found.routes[:, None, :]).any(axis=2)
        routes = float(equal.mean())
    if expected.logits is not None and found.logits is not None:
        logits = float(np.abs(found.logits - expected.logits).max())
    return LayerErrors(
        layer,
        float(np.abs(difference).max()),
        float(np.abs(expected.hidden).max()),
        float(cosines.mean()),
        float(cosines.min()),
        _relative(difference, expected.hidden),
        own,
        routes,
        logits,
    )


def _relative(difference: F32, reference: F32) -> float:
    """Mean over the rows of |difference| / |reference|; 0 / 0 is 0, and what is no number stays none."""
    lengths, base = np.linalg.norm(difference, axis=1), np.linalg.norm(reference, axis=1)
    return float(np.where(lengths == 0, 0.0, lengths / np.maximum(base, np.finfo(np.float32).tiny)).mean())


def _cosines(one: F32, other: F32) -> NDArray[np.float64]:
    wide, odd = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(odd, axis=1)
    found: NDArray[np.float64] = (wide * odd).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return found
