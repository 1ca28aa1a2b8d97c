"""Formats under a byte budget: bits go to where they take most error away per byte.

The error of a matrix W in a format that makes it Q is what its output gets wrong, as a share of the output:
`sum (W - Q)^2 E[x^2] / sum W^2 E[x^2]` over its elements, E[x^2] being the mean square of the column's input
in the calibration (inputs are taken as uncorrelated), measured on evenly spaced rows. Errors of matrices
add up; those of layers count by 1 / (2 * layers), because attention and FFN are so many branches of which
the residual is the sum, while the head reads all of it (a tied embedding counts twice: the residual also
begins with it). An expert counts by the share of its layer's tokens that it saw: a layer whose busy experts
suffer gets more bits. All experts of a layer have one layout, so a choice is per layer and part, not per
expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.config.units import format_bytes, format_size
from strata.core import ExpertId
from strata.errors import CapacityError, WeightValueError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.calibration import CalibrationStats, expert_input
from strata.store.formats import FORMATS, ROW_BLOCK, PackedShape, WeightFormat, expert_slices
from strata.store.manifest import Manifest, SourceRecord
from strata.store.methods import METHODS
from strata.store.options import AUTO, ConvertOptions
from strata.store.pack import dequantize
from strata.store.planning import ConversionPlan, Planner
from strata.store.quantize import quantize
from strata.store.rows import BlockRows, Rows, ValueGuard
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor
from strata.store.stacking import target_rows
from strata.store.stats_check import check_same_model

Floats = NDArray[np.float32]
Sample = tuple[Floats, Floats]
"""Rows f32 `[n, cols]` and the mean squares of their inputs, f32 `[cols]`."""

_LAYERED = ("w4g128", "w4g64", "w4g32", "w8")
_SINGLE = ("w4g64", "w8")
_ONCE = {"head": 1.0, "embed": 2.0}  # a tied embedding is the head, and what the residual begins with
_MATRIX_ROWS = 256
_LAYER_EXPERT_ROWS = 2048
"""Rows of each kind that are looked at in a layer, over all of its experts; 16 of every expert at least."""


@dataclass(frozen=True)
class Unit:
    """What gets one format: part "experts" or "shared" of a layer, or "head" or "embed"."""

    part: str
    layer: int | None = None

    @property
    def key(self) -> str:
        """As `ConvertOptions.overrides` writes it."""
        return self.part if self.layer is None else f"{self.part}.{self.layer}"


@dataclass(frozen=True)
class Offer:
    """A format for a unit: bytes in the store, and the error of its matrices, added up."""

    format: str
    bytes: int
    error: float


@dataclass(frozen=True)
class Choice:
    """options: with the chosen formats. bytes: of the weights, at most. chosen: in the order of the units."""

    options: ConvertOptions
    budget: int
    bytes: int
    chosen: dict[Unit, Offer]


def choose_formats(
    source: CheckpointSource,
    spec: ModelSpec,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
    options: ConvertOptions,
    stats: CalibrationStats,
    budget: int,
) -> Choice:
    """Formats of all parts that `options` leave to "auto", so that the weights take `budget` bytes at most.

    An embedding that is not the head as well keeps its default: nothing is known of what it costs. Raises
    UsageError for statistics of another model, CapacityError where even the smallest formats are too large.
    """
    check_same_model(stats, source, spec, targets)
    plan = Planner(source, spec, options).plan(targets, experts)
    samples = _Samples(source, spec, targets, experts, stats, ValueGuard(options.allow_nan))
    units = [unit for unit in _units(spec, plan, targets) if options.wanted(unit.part, unit.layer) == AUTO]
    offers = {unit: _offers(unit, plan, targets, options, samples) for unit in units}
    scaled = _room_for_scaling(plan, options)
    fixed = scaled + _store_bytes(spec, plan) - sum(_bytes_now(unit, plan, targets) for unit in units)
    while True:
        chosen = spend_best(offers, budget - fixed, budget, fixed)
        formats = _as_options(options, chosen)
        final = _store_bytes(spec, Planner(source, spec, formats).plan(targets, experts)) + scaled
        if final <= budget:
            break
        fixed += final - budget  # headers have grown with the digits of their offsets
    recorded = {
        "bytes": budget,
        "statistics": stats.digest,
        "errors": {unit.key: float(f"{offer.error:.3e}") for unit, offer in chosen.items()},
    }
    return Choice(dataclasses.replace(formats, budget=recorded), budget, final, chosen)


def spend(
    offers: Mapping[Unit, Sequence[Offer]], available: int, budget: int = 0, fixed: int = 0
) -> dict[Unit, Offer]:
    """One offer for each unit, `available` bytes in all at most.

    From the smallest on, always the step that takes most error away per byte, the first among equals.
    budget, fixed: for the error's numbers only. CapacityError where the smallest offers take more.
    """
    chosen = {
        unit: min(found, key=lambda offer: (offer.bytes, offer.error)) for unit, found in offers.items()
    }
    left = available - sum(offer.bytes for offer in chosen.values())
    if left < 0:
        raise CapacityError(
            f"the smallest formats take {format_bytes((budget or available) - left)}, the budget is "
            f"{format_bytes(budget or available)} ({format_size(fixed)} of the former have a fixed format)",
            remedy="a larger --budget, or a smaller --head or --embed",
        )
    while (step := _best_step(offers, chosen, left)) is not None:
        unit, offer = step
        left -= offer.bytes - chosen[unit].bytes
        chosen[unit] = offer
    return chosen


def spend_best(
    offers: Mapping[Unit, Sequence[Offer]], available: int, budget: int, fixed: int
) -> dict[Unit, Offer]:
    """The best of `spend` over all offers of head and embedding: too large a step for what is left when its
    turn comes, as theirs often is, would never be taken."""
    best = spend(offers, available, budget, fixed)
    single = [unit for unit in offers if unit.layer is None]
    for taken in itertools.product(*(offers[unit] for unit in single)):
        held = {**offers, **{unit: [offer] for unit, offer in zip(single, taken, strict=True)}}
        if _least(held) > available:
            continue
        found = spend(held, available)
        if _error(found) < _error(best):
            best = found
    return best


def _least(offers: Mapping[Unit, Sequence[Offer]]) -> int:
    return sum(min(offer.bytes for offer in several) for several in offers.values())


def _error(chosen: Mapping[Unit, Offer]) -> float:
    return sum(offer.error for offer in chosen.values())


def _best_step(
    offers: Mapping[Unit, Sequence[Offer]], chosen: Mapping[Unit, Offer], left: int
) -> tuple[Unit, Offer] | None:
    best, found = -1.0, None
    for unit, several in offers.items():
        now = chosen[unit]
        for offer in several:
            cost, gain = offer.bytes - now.bytes, now.error - offer.error
            if gain <= 0 or cost > left:
                continue
            worth = gain / max(cost, 1)
            if worth > best:
                best, found = worth, (unit, offer)
    return found


def _units(spec: ModelSpec, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> Iterator[Unit]:
    kinds = {target.kind for target in targets}
    for layer in range(spec.layers):
        if any(_belongs(target, Unit("shared", layer)) for target in targets):
            yield Unit("shared", layer)
        if layer in plan.layers:
            yield Unit("experts", layer)
    if "head" in kinds:
        yield Unit("head")
    if "embed" in kinds and spec.tied_head:
        yield Unit("embed")


def _belongs(target: TargetTensor, unit: Unit) -> bool:
    if unit.layer is None or target.kind != unit.part:
        return target.kind == unit.part and unit.layer is None
    return target.name.startswith(names.layer(unit.layer, ""))


def _offers(
    unit: Unit,
    plan: ConversionPlan,
    targets: Sequence[TargetTensor],
    options: ConvertOptions,
    samples: _Samples,
) -> list[Offer]:
    """Every format that can hold the unit's values."""
    exact = "f16" if samples.types(unit) == {"F16"} else "bf16"
    single = unit.layer is None
    candidates = dict.fromkeys((*(_SINGLE if single else _LAYERED), *_kept(unit, plan, targets), exact))
    errors = dict.fromkeys(candidates, 0.0)
    for share, matrix in samples.matrices(unit):
        for name in list(errors):
            try:
                errors[name] += share * relative_error(matrix, FORMATS[name])
            except WeightValueError:  # values beyond the format's scales
                del errors[name]
    return [
        Offer(name, _bytes_in(unit, name, plan, targets, options), error) for name, error in errors.items()
    ]


def _kept(unit: Unit, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> set[str]:
    """The format that "auto" would give, if it is one: it may hold the source's own quantization."""
    if unit.part == "experts":
        assert unit.layer is not None
        record = plan.layers[unit.layer]
        found = {record.gate_up, record.down}
    else:
        found = {plan.tensors[target.name].format for target in targets if _belongs(target, unit)}
    return found if len(found) == 1 else set()


def relative_error(samples: Iterable[Sample], fmt: WeightFormat) -> float:
    """Of one matrix; see the module. 0 where its output is 0."""
    noise = signal = 0.0
    for rows, squares in samples:
        off = rows - dequantize(fmt, quantize(rows, fmt, "sample"))
        noise += float((off * off @ squares).sum())
        signal += float((rows * rows @ squares).sum())
    return noise / signal if signal > 0 else 0.0


def _bytes_in(
    unit: Unit, name: str, plan: ConversionPlan, targets: Sequence[TargetTensor], options: ConvertOptions
) -> int:
    fmt = FORMATS[name]
    if unit.part == "experts":
        assert unit.layer is not None
        record = plan.layers[unit.layer]
        slices = expert_slices(record.width, fmt, options.slices)
        layout = dataclasses.replace(record, gate_up=name, down=name, slices=slices).layout()
        return layout.record_bytes * plan.expert_count
    shapes = [plan.tensors[target.name].shape for target in targets if _belongs(target, unit)]
    return sum(PackedShape(fmt, rows, cols).nbytes for rows, cols in shapes)


def _bytes_now(unit: Unit, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> int:
    if unit.part == "experts":
        assert unit.layer is not None
        return plan.layers[unit.layer].layout().record_bytes * plan.expert_count
    found = [plan.tensors[target.name] for target in targets if _belongs(target, unit)]
    return sum(record.packed_shape().nbytes for record in found)


def _store_bytes(spec: ModelSpec, plan: ConversionPlan) -> int:
    """Of the safetensors files that such a plan makes."""
    source = SourceRecord("", "", ())
    manifest = Manifest(spec, plan.tensors, plan.layers, plan.expert_count, source, {}, "")
    return sum(shard.nbytes for shard in manifest.shards())


def _room_for_scaling(plan: ConversionPlan, options: ConvertOptions) -> int:
    """Methods that fold factors into plain tensors store those that were BF16 as F32: at most all of them."""
    if not any(METHODS[method].scaling for method in options.methods.values()):
        return 0
    return sum(2 * math.prod(record.shape) for record in plan.tensors.values() if record.format == "BF16")


def _as_options(options: ConvertOptions, chosen: Mapping[Unit, Offer]) -> ConvertOptions:
    """Layers in runs: experts.0-3."""
    overrides = dict(options.overrides)
    for part in ("shared", "experts"):
        runs: list[list[Any]] = []  # [first, last, format]
        for unit, offer in chosen.items():
            if unit.part != part:
                continue
            if runs and runs[-1][1:] == [(unit.layer or 0) - 1, offer.format]:
                runs[-1][1] = unit.layer
            else:
                runs.append([unit.layer, unit.layer, offer.format])
        overrides |= {
            f"{part}.{first}" if first == last else f"{part}.{first}-{last}": fmt for first, last, fmt in runs
        }
    single: dict[str, Any] = {u.part: o.format for u, o in chosen.items() if u.layer is None}
    return dataclasses.replace(options, overrides=overrides, **single)


@dataclass(frozen=True)
class _Samples:
    """Rows of the model's matrices, with the mean squares of what they read."""

    source: CheckpointSource
    spec: ModelSpec
    targets: Sequence[TargetTensor]
    experts: Sequence[TargetExpert]
    stats: CalibrationStats
    guard: ValueGuard

    def types(self, unit: Unit) -> set[str]:
        """Dtypes of the unit's sources."""
        if unit.part == "experts":
            blocks = [e.down for e in self.experts if e.layer == unit.layer]
        else:
            blocks = [block for t in self.targets if _belongs(t, unit) for block in t.sources]
        return {self.source.tensors[block.name].dtype for block in blocks}

    def matrices(self, unit: Unit) -> Iterator[tuple[float, list[Sample]]]:
        """Samples of every matrix of the unit, and by what share its error counts."""
        if unit.part == "experts":
            assert unit.layer is not None
            yield from self._experts(unit.layer)
            return
        for target in self.targets:
            if _belongs(target, unit):
                rows = target_rows(self.source, target, self.guard, 0)
                name = names.HEAD if target.kind == "embed" else target.name
                heads = self.stats.members(name)
                share = self._branch if unit.layer is not None else _ONCE[unit.part]
                yield (
                    share,
                    [self._sample(rows, run, name, heads) for run in _runs(rows.count, _MATRIX_ROWS, heads)],
                )

    @property
    def _branch(self) -> float:
        """What a layer's attention or FFN is of the residual that the head reads."""
        return 1 / (2 * self.spec.layers)

    def _sample(self, rows: Rows, run: tuple[int, int], name: str, heads: int) -> Sample:
        start, stop = run
        found = self.stats.linear(name, start * heads // rows.count, moments=False)
        return np.array(rows.floats(start, stop)), found.mean_square

    def _experts(self, layer: int) -> Iterator[tuple[float, list[Sample]]]:
        tokens = self.stats.tokens(expert_input(layer, "gate_up"))
        several = [expert for expert in self.experts if expert.layer == layer]
        wanted = max(ROW_BLOCK, _LAYER_EXPERT_ROWS // len(several))
        for expert in several:
            share = self._branch * float(tokens[expert.index]) / max(1, int(tokens.sum()))
            if share == 0:
                continue
            which = ExpertId(layer, expert.index)
            hidden = self.stats.expert(which, "gate_up", moments=False).mean_square
            inner = self.stats.expert(which, "down", moments=False).mean_square
            gate, up, down = (
                BlockRows(self.source, b, self.guard) for b in (expert.gate, expert.up, expert.down)
            )
            runs = _runs(gate.count, wanted // 2)
            yield share, [(np.array(part.floats(*run)), hidden) for run in runs for part in (gate, up)]
            yield share, [(np.array(down.floats(*run)), inner) for run in _runs(down.count, wanted)]


def _runs(count: int, wanted: int, heads: int = 1) -> list[tuple[int, int]]:
    """Runs of at most 16 rows, evenly spaced, `wanted` rows in all or so; none reaches into another head."""
    size = count // heads
    starts = [head * size + at for head in range(heads) for at in range(0, size, ROW_BLOCK)]
    number = min(len(starts), max(1, wanted // ROW_BLOCK))
    chosen = [starts[i * len(starts) // number] for i in range(number)]
    return [(start, min(start + ROW_BLOCK, (start // size + 1) * size)) for start in chosen]
