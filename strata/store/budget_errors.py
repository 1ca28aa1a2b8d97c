"""What a format costs each part of a model: the errors that `budget` weighs against bytes.

The error of a matrix W in a format that makes it Q is what its output gets wrong, as a share of the output:
`sum (W - Q)^2 E[x^2] / sum W^2 E[x^2]` over its elements, E[x^2] being the mean square of the column's input
in the calibration (inputs are taken as uncorrelated), measured on evenly spaced rows. Of a part with a
method, Q is what the method makes of these rows, and the inputs are as related as its statistics say. Errors
of matrices add up; those of layers count by 1 / (2 * layers), because attention and FFN are so many branches
of which the residual is the sum, while the head reads all of it (a tied embedding counts twice: the residual
also begins with it). An expert counts by the share of its layer's tokens that it saw: a layer whose busy
experts suffer gets more bits. What a method takes off the error of experts is measured on the busiest few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import WeightValueError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.calibration import CalibrationStats
from strata.store.calibration_inputs import ExpertPart, RowInput, expert_input, row_inputs
from strata.store.clipping import clipped
from strata.store.formats import FORMATS, ROW_BLOCK, WeightFormat
from strata.store.inputs import Inputs
from strata.store.methods import PLAIN
from strata.store.options import ConvertOptions
from strata.store.pack import dequantize
from strata.store.planning import Planner
from strata.store.quantize import quantize
from strata.store.rows import BlockRows, ValueGuard
from strata.store.scaled_rows import scaled
from strata.store.source import CheckpointSource, SourceRows, TargetExpert, TargetTensor
from strata.store.stacking import target_rows
from strata.store.treatment import Rounding

Floats = NDArray[np.float32]
Sample = tuple[Floats, Floats]
"""Rows f32 `[n, cols]` and the mean squares of their inputs, f32 `[cols]`."""

_ONCE = {"head": 1.0, "embed": 2.0}  # a tied embedding is the head, and what the residual begins with
_MATRIX_ROWS = 256
_LAYER_EXPERT_ROWS = 2048
"""Rows of each kind that are looked at in a layer, over all of its experts; 16 of every expert at least."""
_TRIED_EXPERTS = 4
"""Experts of a layer that a method is tried on: second moments are factored anew for every format."""


@dataclass(frozen=True)
class Unit:
    """What gets one format: all experts of a layer, one matrix of its part "shared", or "head" or "embed"."""

    part: str
    layer: int | None = None
    matrix: str = ""

    @property
    def name(self) -> str:
        """What it is in any layer."""
        return self.matrix or self.part

    @property
    def key(self) -> str:
        """As `ConvertOptions.overrides` writes it."""
        return self.name if self.layer is None else f"{self.name}.{self.layer}"

    def holds(self, target: TargetTensor) -> bool:
        """Whether a tensor that is no routed expert's belongs to it."""
        return target.kind == self.part and (self.layer, self.matrix) == names.place(target.name)


def relative_error(samples: Iterable[Sample], rounding: Rounding, fmt: WeightFormat) -> float:
    """Of one matrix that is rounded by its values alone; see the module. 0 where its output is 0."""
    noise = signal = 0.0
    for rows, squares in samples:
        off = rows - dequantize(fmt, rounding(rows, fmt, "sample", 0))
        noise += float((off * off @ squares).sum())
        signal += float((rows * rows @ squares).sum())
    return noise / signal if signal > 0 else 0.0


class FormatErrors:
    """Of one model, one set of statistics and the methods of one conversion."""

    def __init__(
        self,
        source: CheckpointSource,
        spec: ModelSpec,
        targets: Sequence[TargetTensor],
        experts: Sequence[TargetExpert],
        options: ConvertOptions,
        stats: CalibrationStats,
    ) -> None:
        self._source, self._spec, self._targets, self._experts = source, spec, targets, experts
        self._options, self._stats = options, stats
        self._guard = ValueGuard(options.allow_nan)
        self._planners: dict[tuple[str, str], Planner] = {}

    def types(self, unit: Unit) -> set[str]:
        """Dtypes of the unit's sources."""
        if unit.part == "experts":
            blocks = [e.down for e in self._experts if e.layer == unit.layer]
        else:
            blocks = [block for t in self._targets if unit.holds(t) for block in t.sources]
        return {self._source.tensors[block.name].dtype for block in blocks}

    def of(self, unit: Unit, formats: Iterable[str]) -> dict[str, float]:
        """The unit's error in each format that can hold its values."""
        found = dict.fromkeys(formats, 0.0)
        plain = self._options.method(unit.part) == PLAIN
        if plain or unit.part == "experts":
            by_values = self._cut(unit, quantize) if plain else quantize  # which `_gain` compares with
            for share, matrix in self._matrices(unit):
                _add(found, share, partial(relative_error, matrix, by_values))
        else:
            for target in filter(unit.holds, self._targets):
                _add(found, self._share(unit), partial(self._treated, unit, target))
        if not plain and unit.part == "experts":
            return {name: error * self._gain(unit, FORMATS[name]) for name, error in found.items()}
        return found

    def _cut(self, unit: Unit, rounding: Rounding) -> Rounding:
        """The rounding with what `clip` makes of w8, as the conversion will have it."""
        clip = self._options.clip
        return clipped(clip, rounding) if clip is not None and self._options.clips(unit.part) else rounding

    def _share(self, unit: Unit) -> float:
        """What a layer's attention or FFN is of the residual that the head reads."""
        return _ONCE[unit.part] if unit.layer is None else 1 / (2 * self._spec.layers)

    def _planner(self, unit: Unit, fmt: WeightFormat) -> Planner:
        """Of a conversion with all of the unit's part in `fmt`: it knows the factors and roundings."""
        key = unit.part, fmt.name
        if key not in self._planners:
            part: dict[str, str] = {unit.part: fmt.name}
            options = dataclasses.replace(self._options, clip=None, **part)  # type: ignore[arg-type]
            self._planners[key] = Planner(self._source, self._spec, options, self._stats)
            self._planners[key].plan(self._targets, self._experts)
        return self._planners[key]

    def _treated(self, unit: Unit, target: TargetTensor, fmt: WeightFormat) -> float:
        """The error of a matrix of the shared file, rows with inputs of their own apart."""
        how = self._planner(unit, fmt).treatment(target.name)
        round_rows = self._cut(unit, how.rounding)
        plain = target_rows(self._source, target, self._guard, 0)
        rows, by, total = scaled(plain, how.scaling.columns_only), how.scaling.cols, 0.0
        parts = row_inputs(self._spec, target.name, rows.count)
        for part in parts:
            runs = _runs(part.start, part.stop, _MATRIX_ROWS // len(parts))
            values = np.concatenate([rows.floats(*run) for run in runs])
            inputs = Inputs.of(self._stats.linear(part.name, part.member)).divided(by)
            off = values - dequantize(fmt, round_rows(values, fmt, target.name, part.start))
            signal = inputs.cost(values)
            total += _weight(part, parts) * inputs.cost(off) / signal if signal > 0 else 0.0
        return total

    def _gain(self, unit: Unit, fmt: WeightFormat) -> float:
        """The method's error as a share of plain rounding's, on the busiest experts of a layer."""
        assert unit.layer is not None
        tokens = self._stats.tokens(expert_input(unit.layer, "gate_up"))
        several = [expert for expert in self._experts if expert.layer == unit.layer]
        busiest = sorted(several, key=lambda e: -int(tokens[e.index]))[:_TRIED_EXPERTS]
        ours = plain = 0.0
        for expert in busiest:
            how = self._planner(unit, fmt).expert_treatment(expert)
            parts: tuple[tuple[SourceRows, ExpertPart, Floats | None, Rounding], ...] = (
                (expert.gate, "gate_up", how.gate.cols, how.gate_up_rounding),
                (expert.up, "gate_up", how.up.cols, how.gate_up_rounding),
                (expert.down, "down", how.down.cols, how.down_rounding),
            )
            for block, part, by, rounding in parts:
                rows = BlockRows(self._source, block, self._guard)
                values = np.concatenate([rows.floats(*run) for run in _runs(0, rows.count, _MATRIX_ROWS)])
                inputs = Inputs.of(self._stats.expert(ExpertId(unit.layer, expert.index), part))
                ours += _cost(values, fmt, self._cut(unit, rounding), inputs, by)
                plain += _cost(values, fmt, quantize, inputs, None)
        return ours / plain if plain > 0 else 1.0

    def _matrices(self, unit: Unit) -> Iterator[tuple[float, list[Sample]]]:
        """Samples of every matrix of the unit, and by what share its error counts."""
        if unit.part == "experts":
            assert unit.layer is not None
            yield from self._expert_matrices(unit.layer)
            return
        for target in self._targets:
            if unit.holds(target):
                rows = target_rows(self._source, target, self._guard, 0)
                name = names.HEAD if target.kind == "embed" else target.name
                parts = row_inputs(self._spec, name, rows.count)
                for part in parts:
                    squares = self._stats.linear(part.name, part.member, moments=False).mean_square
                    runs = _runs(part.start, part.stop, _MATRIX_ROWS // len(parts))
                    samples = [(np.array(rows.floats(*run)), squares) for run in runs]
                    yield self._share(unit) * _weight(part, parts), samples

    def _expert_matrices(self, layer: int) -> Iterator[tuple[float, list[Sample]]]:
        tokens = self._stats.tokens(expert_input(layer, "gate_up"))
        several = [expert for expert in self._experts if expert.layer == layer]
        wanted = max(ROW_BLOCK, _LAYER_EXPERT_ROWS // len(several))
        for expert in several:
            share = self._share(Unit("experts", layer)) * float(tokens[expert.index])
            share /= max(1, int(tokens.sum()))
            if share == 0:
                continue
            which = ExpertId(layer, expert.index)
            hidden = self._stats.expert(which, "gate_up", moments=False).mean_square
            inner = self._stats.expert(which, "down", moments=False).mean_square
            gate, up, down = (
                BlockRows(self._source, b, self._guard) for b in (expert.gate, expert.up, expert.down)
            )
            runs = _runs(0, gate.count, wanted // 2)
            yield share, [(np.array(part.floats(*run)), hidden) for run in runs for part in (gate, up)]
            yield share, [(np.array(down.floats(*run)), inner) for run in _runs(0, down.count, wanted)]


def _add(errors: dict[str, float], share: float, error: Callable[[WeightFormat], float]) -> None:
    """A matrix's errors to those of its unit; formats whose scales cannot hold its values are dropped."""
    for name in list(errors):
        try:
            errors[name] += share * error(FORMATS[name])
        except WeightValueError:
            del errors[name]


def _cost(values: Floats, fmt: WeightFormat, rounding: Rounding, inputs: Inputs, by: Floats | None) -> float:
    """Of rounding rows whose columns are multiplied by `by` first, and their inputs divided."""
    rows = values if by is None else values * by
    return inputs.divided(by).cost(rows - dequantize(fmt, rounding(rows, fmt, "sample", 0)))


def _weight(part: RowInput, parts: Sequence[RowInput]) -> float:
    """What the error of rows with an input of their own counts: heads share what one matrix counts. Values
    count beside queries and keys, because what attention makes of a token is made of values alone."""
    return 1 / sum(other.name == part.name for other in parts)


def _runs(first: int, last: int, wanted: int) -> list[tuple[int, int]]:
    """Runs of at most 16 rows of [first, last), evenly spaced, `wanted` rows in all or so."""
    starts = range(first, last, ROW_BLOCK)
    number = min(len(starts), max(1, wanted // ROW_BLOCK))
    chosen = [starts[i * len(starts) // number] for i in range(number)]
    return [(start, min(start + ROW_BLOCK, last)) for start in chosen]
