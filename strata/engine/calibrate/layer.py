"""One decoder layer over all windows: attention and router window by window, then expert after expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec
from strata.backends.parts import Experts, FeedForward, Layer, RoutedFfn
from strata.core import PAGE_TOKENS, Batch
from strata.engine.calibrate.accumulate import Accumulator
from strata.engine.calibrate.recording import RecordingBackend
from strata.errors import NumericalError
from strata.plan.spec import ModelSpec
from strata.store.calibration_inputs import (
    EXPERT_PARTS,
    expert_input,
    layer_inputs,
    pooled_input,
    values_input,
)
from strata.store.calibration_writer import StatsWriter

Floats = NDArray[np.float32]
Advance = Callable[[int], None]

CHUNK = 1024
"""Rows of an expert at a time."""


@dataclass(frozen=True)
class Pass:
    """What every layer of a run shares. windows: slices of the tokens, each read on its own.

    advance: hears of rows done, twice of each: with the windows, and with the experts.
    """

    spec: ModelSpec
    backend: RecordingBackend
    windows: Sequence[slice]
    moments: bool
    writer: StatsWriter
    advance: Advance

    @property
    def tokens(self) -> int:
        """Rows in all."""
        return int(self.windows[-1].stop)


def run_layer(run: Pass, layer: Layer, index: int, source: Floats, target: Floats, hidden: Floats) -> None:
    """source, target: the residual before and after layer `index`, f32 `[tokens, hidden]`; hidden: scratch of
    the same shape. What the layer's matrices read is written. Raises NumericalError for NaN and Inf."""
    found = _accumulators(run, index)
    listeners = {name: members[0].add for name, members in found.items()}
    for name, members in found.items():
        listeners |= {f"{name}[{head}]": member.add for head, member in enumerate(members)}
    with run.backend.heard_by(listeners):
        if isinstance(layer.ffn, FeedForward):
            _dense(run, layer, index, source, target)
        else:
            gate_up, down = (found[pooled_input(index, part)][0] for part in EXPERT_PARTS)
            routes = _attend_and_route(run, layer, index, source, target, hidden, gate_up)
            _experts(run, layer.ffn.experts, index, hidden, routes, target, down)
    for name, members in found.items():
        for member, accumulator in enumerate(members):
            run.writer.write(name, member, accumulator.result())


def _accumulators(run: Pass, index: int) -> dict[str, list[Accumulator]]:
    """Of every input of the layer but those of single experts, which are counted one expert at a time."""
    each = {expert_input(index, part) for part in EXPERT_PARTS}
    experts = run.spec.experts
    rows = {values_input(index): run.tokens * run.spec.attention.kv_heads}
    if experts:
        rows[pooled_input(index, "down")] = run.tokens * experts.router.top_k
    return {
        entry.name: [
            Accumulator(entry.cols, rows.get(entry.name, run.tokens), run.moments)
            for _ in range(entry.members)
        ]
        for entry in layer_inputs(run.spec, index)
        if entry.name not in each
    }


@dataclass(frozen=True)
class _Routes:
    """ids i32 and weights f32 `[tokens, top_k]`."""

    ids: NDArray[np.int32]
    weights: Floats


def _width(spec: ModelSpec) -> int:
    assert spec.experts is not None
    return spec.experts.width


def _windows(
    run: Pass, layer: Layer, index: int, source: Floats, half: int
) -> Iterator[tuple[slice, Floats]]:
    """Every window and its residual after attention, in memory; reported and checked when done with."""
    pages = -(-max(window.stop - window.start for window in run.windows) // PAGE_TOKENS)
    kv = replace(KvSpec.of(run.spec, PAGE_TOKENS, "f32"), layers=1)
    cache, table = run.backend.kv_cache(kv, pages), np.arange(pages, dtype=np.int32)
    part = replace(layer.attention, call=replace(layer.attention.call, layer=0))
    for window in run.windows:
        residual = np.array(source[window])
        rows = np.arange(len(residual), dtype=np.int32)
        run.backend.attend(residual, part, cache, Batch.single(rows, rows, table, rows[:0]))
        yield window, residual
        _check(residual, index)
        run.advance(len(rows) * half)


def _check(residual: Floats, index: int) -> None:
    if not np.isfinite(residual).all():
        raise NumericalError(
            f"layer {index}: NaN or Inf among the hidden states",
            remedy="`strata verify` the store, or get an undamaged checkpoint",
        )


def _dense(run: Pass, layer: Layer, index: int, source: Floats, target: Floats) -> None:
    assert isinstance(layer.ffn, FeedForward)
    for window, residual in _windows(run, layer, index, source, 2):
        run.backend.feed_forward(residual, layer.ffn)
        target[window] = residual


def _attend_and_route(
    run: Pass, layer: Layer, index: int, source: Floats, target: Floats, hidden: Floats, pooled: Accumulator
) -> _Routes:
    """Everything but the routed experts; hidden: what they will read."""
    assert isinstance(layer.ffn, RoutedFfn)
    top_k = layer.ffn.router.spec.top_k
    routes = _Routes(np.empty((run.tokens, top_k), np.int32), np.empty((run.tokens, top_k), np.float32))
    for window, residual in _windows(run, layer, index, source, 1):
        routing = run.backend.choose_experts(residual, layer.ffn.router)
        pooled.add(routing.hidden)
        hidden[window], routes.ids[window], routes.weights[window] = routing
        run.backend.without_experts(residual, routing, layer.ffn.experts)
        target[window] = residual
    return routes


def _experts(
    run: Pass, part: Experts, index: int, hidden: Floats, routes: _Routes, target: Floats, pooled: Accumulator
) -> None:
    """One expert in memory at a time, in ascending order; their outputs join the residual."""
    order = np.argsort(routes.ids, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(routes.ids.ravel(), minlength=part.bank.count))
    top_k, reported = routes.ids.shape[1], 0
    for expert, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        chosen = order[first:last]  # places in ids: row * top_k + choice
        _expert(run, part, (index, expert), hidden, routes, chosen, target, pooled)
        run.advance(int(last) // top_k - reported)
        reported = int(last) // top_k
    for window in run.windows:
        _check(target[window], index)


def _expert(
    run: Pass,
    part: Experts,
    where: tuple[int, int],
    hidden: Floats,
    routes: _Routes,
    chosen: NDArray[np.int64],
    target: Floats,
    pooled: Accumulator,
) -> None:
    (layer, index), count = where, len(chosen)
    gate_up = Accumulator(run.spec.hidden, count, run.moments)
    down = Accumulator(_width(run.spec), count, run.moments)
    expert = run.backend.expert(part.bank, index) if count else None
    for start in range(0, count, CHUNK):
        assert expert is not None
        places = chosen[start : start + CHUNK]
        rows = places // routes.ids.shape[1]
        x = hidden[rows]
        gate_up.add(x)
        h = expert.intermediate(x, part.gating)
        down.add(h)
        pooled.add(h)
        weights = routes.weights.ravel()[places] * np.float32(part.scale)
        target[rows] += expert.down(h) * weights[:, None]  # a row has an expert once: no index twice
    run.writer.write(expert_input(layer, "gate_up"), index, gate_up.result())
    run.writer.write(expert_input(layer, "down"), index, down.result())
