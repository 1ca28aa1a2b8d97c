"""Formats under a byte budget: bits go to where they take most error away per byte.

`budget_errors` says what the error of a format is. All experts of a layer have one layout, so they have one
choice; other matrices have one each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.config.units import format_bytes, format_size
from strata.errors import CapacityError, UsageError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.budget_errors import FormatErrors, Unit
from strata.store.calibration import CalibrationStats
from strata.store.formats import FORMATS, PackedShape, expert_slices
from strata.store.manifest import Manifest, SourceRecord
from strata.store.methods import PLAIN
from strata.store.options import AUTO, ConvertOptions
from strata.store.planning import ConversionPlan, Planner
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor
from strata.store.stats_check import check_same_model, with_stats

_LAYERED = ("w4g128", "w4g64", "w4g32", "w8")
_WITH_MINIMUM = ("w4g64m", "w4g32m")
"""Offered to parts with a method as well: plain rounding gains little by a minimum, gptq a lot."""
_SINGLE = ("w4g64", "w8")


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
    UsageError where they leave none, for statistics of another model or, for gptq, without moments,
    CapacityError where even the smallest formats are too large.
    """
    if options.calibrated:
        with_stats(options, stats, source, spec, targets)
    else:
        check_same_model(stats, source, spec, targets)
    plan = _planned(source, spec, options, targets, experts)
    errors = FormatErrors(source, spec, targets, experts, options, stats)
    units = [unit for unit in _units(spec, plan, targets) if _open(unit, options)]
    if not units:
        raise UsageError(
            f"the budget of {format_size(budget)} has no format to choose: every part has one of its own",
            remedy="leave a part to auto (--experts, --shared, --layer-format), or leave --budget out",
        )
    offers = {unit: _offers(unit, plan, targets, options, errors) for unit in units}
    scaled = _room_for_scaling(plan, options)
    fixed = scaled + _store_bytes(spec, plan) - sum(_bytes_now(unit, plan, targets) for unit in units)
    while True:
        chosen = spend_best(offers, budget - fixed, budget, fixed)
        formats = _as_options(options, chosen)
        final = _store_bytes(spec, _planned(source, spec, formats, targets, experts)) + scaled
        if final <= budget:
            break
        fixed += final - budget  # headers have grown with the digits of their offsets
    recorded = {
        "bytes": budget,
        "statistics": stats.digest,
        "errors": {unit.key: float(f"{offer.error:.3e}") for unit, offer in chosen.items()},
    }
    return Choice(dataclasses.replace(formats, budget=recorded), budget, final, chosen)


def _planned(
    source: CheckpointSource,
    spec: ModelSpec,
    options: ConvertOptions,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
) -> ConversionPlan:
    """Sizes alone: whether `clip` finds anything to cut off is asked of the chosen formats."""
    return Planner(source, spec, dataclasses.replace(options, clip=None)).plan(targets, experts)


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


def _open(unit: Unit, options: ConvertOptions) -> bool:
    """Whether its format was left to the budget."""
    return options.wanted(unit.part, unit.layer, unit.matrix) == AUTO


def _units(spec: ModelSpec, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> Iterator[Unit]:
    kinds = {target.kind for target in targets}
    places = [names.place(target.name) for target in targets if target.kind == "shared"]
    for layer in range(spec.layers):
        yield from (Unit("shared", layer, matrix) for at, matrix in places if at == layer)
        if layer in plan.layers:
            yield Unit("experts", layer)
    if "head" in kinds:
        yield Unit("head")
    if "embed" in kinds and spec.tied_head:
        yield Unit("embed")


def _offers(
    unit: Unit,
    plan: ConversionPlan,
    targets: Sequence[TargetTensor],
    options: ConvertOptions,
    errors: FormatErrors,
) -> list[Offer]:
    """Every format that can hold the unit's values."""
    exact = "f16" if errors.types(unit) == {"F16"} else "bf16"
    formats = _SINGLE if unit.layer is None else _LAYERED
    if options.method(unit.part) != PLAIN:
        formats = (*formats, *_WITH_MINIMUM)
    candidates = dict.fromkeys((*formats, *_kept(unit, plan, targets), exact))
    return [
        Offer(name, _bytes_in(unit, name, plan, targets, options), error)
        for name, error in errors.of(unit, candidates).items()
    ]


def _kept(unit: Unit, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> set[str]:
    """The format that "auto" would give, if it is one: it may hold the source's own quantization."""
    if unit.part == "experts":
        assert unit.layer is not None
        record = plan.layers[unit.layer]
        found = {record.gate_up, record.down}
    else:
        found = {plan.tensors[target.name].format for target in targets if unit.holds(target)}
    return found if len(found) == 1 else set()


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
    shapes = [plan.tensors[target.name].shape for target in targets if unit.holds(target)]
    return sum(PackedShape(fmt, rows, cols).nbytes for rows, cols in shapes)


def _bytes_now(unit: Unit, plan: ConversionPlan, targets: Sequence[TargetTensor]) -> int:
    if unit.part == "experts":
        assert unit.layer is not None
        return plan.layers[unit.layer].layout().record_bytes * plan.expert_count
    found = [plan.tensors[target.name] for target in targets if unit.holds(target)]
    return sum(record.packed_shape().nbytes for record in found)


def _store_bytes(spec: ModelSpec, plan: ConversionPlan) -> int:
    """Of the safetensors files that such a plan makes."""
    source = SourceRecord("", "", ())
    manifest = Manifest(spec, plan.tensors, plan.layers, plan.expert_count, source, {}, "")
    return sum(shard.nbytes for shard in manifest.shards())


def _room_for_scaling(plan: ConversionPlan, options: ConvertOptions) -> int:
    """Methods that fold factors into plain tensors store those that were BF16 as F32: at most all of them."""
    if not options.scaled:
        return 0
    return sum(2 * math.prod(record.shape) for record in plan.tensors.values() if record.format == "BF16")


def _as_options(options: ConvertOptions, chosen: Mapping[Unit, Offer]) -> ConvertOptions:
    """Layers in runs: experts.0-3."""
    overrides = dict(options.overrides)
    for part in dict.fromkeys(unit.name for unit in chosen if unit.layer is not None):
        runs: list[list[Any]] = []  # [first, last, format]
        for unit, offer in chosen.items():
            if unit.name != part:
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
