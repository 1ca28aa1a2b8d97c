"""A conversion that knows the model's inputs: the rounding and the folded factors of every tensor and expert.

Whatever is found here depends on source, statistics and options alone, so that a conversion that was stopped
goes on with the same factors. Factors are searched when the first tensor that has them is converted and kept
(a few KB per layer); moments are read from the disk for one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.plan.spec import ModelSpec
from strata.store import folding, names
from strata.store.calibration import CalibrationStats
from strata.store.calibration_inputs import ExpertPart, RowInput, pooled_input, row_inputs
from strata.store.folding import Fold
from strata.store.formats import FORMATS, WeightFormat
from strata.store.gptq import has_integers
from strata.store.inputs import Inputs
from strata.store.manifest import LayerRecord, TensorRecord
from strata.store.methods import METHODS, Kind
from strata.store.options import ConvertOptions
from strata.store.rescaling import Sample, best_factors
from strata.store.roundings import ByRows, rounding
from strata.store.rows import BlockRows, Rows, ValueGuard
from strata.store.scaled_rows import NONE, Scaling
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor
from strata.store.stacking import target_rows
from strata.store.treatment import ExpertTreatment, Rounding, Treatment

Floats = NDArray[np.float32]
_SAMPLE_RUNS, _RUN_ROWS = 4, 32  # rows of a matrix that alpha is searched on, spread over it
_SAMPLE_EXPERTS = 8


@dataclass(frozen=True)
class Planned:
    """What a conversion will write, by name and by layer."""

    tensors: Mapping[str, TensorRecord]
    layers: Mapping[int, LayerRecord]

    def integers(self, fold: Fold) -> bool:
        """Whether all that reads a fold's channels is rounded to integers: nothing exact is touched."""
        found = [FORMATS[self.tensors[name].format] for name in fold.readers]
        if fold.experts and fold.layer is not None:
            record = self.layers[fold.layer]
            found.append(FORMATS[record.gate_up if fold.place == "norm" else record.down])
            if fold.place == "up":
                found.append(FORMATS[record.gate_up])
        elif fold.place != "norm":
            found.append(FORMATS[self.tensors[fold.maker].format])
        return all(has_integers(fmt) for fmt in found)


class Calibrated:
    """The treatments of one conversion."""

    def __init__(
        self,
        source: CheckpointSource,
        spec: ModelSpec,
        options: ConvertOptions,
        stats: CalibrationStats,
        planned: Planned,
        targets: Sequence[TargetTensor],
        experts: Sequence[TargetExpert],
    ) -> None:
        self._source, self._spec, self._options, self._stats = source, spec, options, stats
        self._planned = planned
        self._targets = {target.name: target for target in targets}
        self._experts = _by_layer(experts)
        self._folds = [fold for fold in folding.folds(spec) if self._active(fold)]
        self._found: dict[Fold, Floats | None] = {}

    @property
    def rescaled(self) -> set[str]:
        """Plain tensors that factors are folded into: they are stored as F32."""
        makers = {fold.maker for fold in self._folds if fold.place == "norm"}
        biases = {
            names.layer(fold.layer, "attn.qkv.bias")
            for fold in self._folds
            if fold.place == "value" and fold.layer is not None and self._spec.attention.qkv_bias
        }
        return makers | biases | {name for fold in self._folds for name in fold.plain}

    def plain(self, name: str) -> Scaling:
        """Factors of a plain tensor, for its last dimension."""
        found = NONE
        for fold in self._folds:
            factors = self._factors(fold) if name in self._touched(fold) else None
            if factors is None:
                continue
            if name in fold.plain:
                found *= Scaling(cols=factors)
            elif fold.place == "norm":
                found *= Scaling(cols=_inverse(factors))
            else:
                found *= Scaling(cols=self._value_rows(factors))
        return found

    def matrix(self, name: str) -> Treatment:
        """Of a packed tensor of the shared file."""
        scaling = NONE
        for fold in self._folds:
            factors = self._factors(fold) if name in self._touched(fold) else None
            if factors is not None:
                scaling *= self._matrix_scaling(fold, name, factors)
        return Treatment(scaling, self._rounding(name, scaling))

    def expert(self, target: TargetExpert) -> ExpertTreatment:
        """Of a routed expert; called by the thread that converts it, for the search it takes."""
        record = self._planned.layers[target.layer]
        cols = self._layer_factors(target.layer)
        inner = self._inner_factors(target)
        up_rows = None if inner is None else _inverse(inner)
        return ExpertTreatment(
            gate=Scaling(None, cols),
            up=Scaling(up_rows, cols),
            down=Scaling(None, inner),
            gate_up_rounding=self._expert_rounding(target, "gate_up", FORMATS[record.gate_up], cols),
            down_rounding=self._expert_rounding(target, "down", FORMATS[record.down], inner),
        )

    def _active(self, fold: Fold) -> bool:
        parts = {"head" if name == names.HEAD else "shared" for name in fold.readers}
        if fold.experts:
            parts.add("experts")
        kinds = {METHODS[self._options.method(part)].scaling for part in parts}
        return len(kinds) == 1 and None not in kinds and self._planned.integers(fold)

    def _touched(self, fold: Fold) -> tuple[str, ...]:
        bias = (fold.maker.replace(".weight", ".bias"),) if fold.place == "value" else ()
        return (fold.maker, *fold.readers, *fold.plain, *bias)

    def _matrix_scaling(self, fold: Fold, name: str, factors: Floats) -> Scaling:
        if name != fold.maker:
            cols = folding.per_column(self._spec, factors) if fold.place == "value" else factors
            return Scaling(cols=cols)
        return Scaling(rows=self._value_rows(factors) if fold.place == "value" else _inverse(factors))

    def _value_rows(self, factors: Floats) -> Floats:
        """1 / factors for v's rows, 1 for q's and k's."""
        if self._spec.attention.mla is not None:
            return _inverse(factors)
        rows = folding.value_rows(self._spec)
        found = np.ones(rows.stop, np.float32)
        found[rows] = _inverse(factors)
        return found

    def _factors(self, fold: Fold) -> Floats | None:
        """Searched at the first call, which the thread makes that hands out the tasks."""
        if fold not in self._found:
            self._found[fold] = self._search(fold)
        return self._found[fold]

    def _kind(self, part: str) -> Kind | None:
        return METHODS[self._options.method(part)].scaling

    def _search(self, fold: Fold) -> Floats | None:
        part = "head" if fold.readers == (names.HEAD,) else "experts" if fold.experts else "shared"
        kind = self._kind(part)
        assert kind is not None and (fold.layer is not None or not fold.experts)
        samples = [sample for name in fold.readers for sample in self._samples(name)]
        if fold.experts and fold.layer is not None:
            inputs = self._inputs(pooled_input(fold.layer, "gate_up"))
            samples += self._expert_samples(fold.layer)
        else:
            inputs = self._inputs(fold.readers[0])
        if fold.place == "value":
            return self._value_factors(kind, inputs, samples)
        return best_factors(kind, inputs, samples, self._options.alpha)

    def _value_factors(self, kind: Kind, inputs: Inputs, samples: list[Sample]) -> Floats | None:
        """One factor per value, for all the heads that read it."""
        spec = self._spec

        def shared(found: Floats) -> Floats:
            return folding.per_column(spec, folding.per_value(spec, found))

        found = best_factors(kind, inputs, samples, self._options.alpha, shared)
        return None if found is None else folding.per_value(spec, found)

    def _layer_factors(self, layer: int) -> Floats | None:
        for fold in self._folds:
            if fold.layer == layer and fold.place == "norm" and fold.experts:
                return self._factors(fold)
        return None

    def _inner_factors(self, target: TargetExpert) -> Floats | None:
        if not any(f.layer == target.layer and f.place == "up" and f.experts for f in self._folds):
            return None
        kind = self._kind("experts")
        assert kind is not None
        down = BlockRows(self._source, target.down, ValueGuard(self._options.allow_nan))
        fmt = FORMATS[self._planned.layers[target.layer].down]
        inputs = self._expert_inputs(target, "down")
        return best_factors(kind, inputs, _samples(down, fmt), self._options.alpha)

    def _rounding(self, name: str, scaling: Scaling) -> Rounding:
        fmt = FORMATS[self._planned.tensors[name].format]
        method = self._options.method(_part_of(name))
        moments = METHODS[method].rounding == "gptq"
        parts = row_inputs(self._spec, name, self._planned.tensors[name].shape[0])
        found = [
            self._rounding_of(method, fmt, partial(self._row_inputs, part, moments, scaling))
            for part in parts
        ]
        return found[0] if len(found) == 1 else ByRows([part.stop for part in parts], found)

    def _rounding_of(self, method: str, fmt: WeightFormat, inputs: Callable[[], Inputs]) -> Rounding:
        return rounding(method, fmt, inputs, self._options.act_order)

    def _row_inputs(self, part: RowInput, moments: bool, scaling: Scaling) -> Inputs:
        return self._inputs(part.name, moments, part.member).divided(scaling.cols)

    def _expert_rounding(
        self, target: TargetExpert, part: ExpertPart, fmt: WeightFormat, by: Floats | None
    ) -> Rounding:
        method = self._options.method("experts")
        return self._rounding_of(method, fmt, lambda: self._expert_inputs(target, part).divided(by))

    def _inputs(self, name: str, moments: bool = True, member: int = 0) -> Inputs:
        return Inputs.of(self._stats.linear(name, member, moments=moments))

    def _expert_inputs(self, target: TargetExpert, part: ExpertPart) -> Inputs:
        return Inputs.of(self._stats.expert(ExpertId(target.layer, target.index), part))

    def _samples(self, name: str) -> list[Sample]:
        guard = ValueGuard(self._options.allow_nan)
        rows = target_rows(self._source, self._targets[name], guard, 0)
        return _samples(rows, FORMATS[self._planned.tensors[name].format])

    def _expert_samples(self, layer: int) -> list[Sample]:
        guard = ValueGuard(self._options.allow_nan)
        fmt = FORMATS[self._planned.layers[layer].gate_up]
        experts = self._experts[layer]
        step = -(-len(experts) // _SAMPLE_EXPERTS)
        blocks = [block for expert in experts[::step] for block in (expert.gate, expert.up)]
        return [s for block in blocks for s in _samples(BlockRows(self._source, block, guard), fmt, 1)]


def _inverse(factors: Floats) -> Floats:
    return np.float32(1) / factors


def _part_of(name: str) -> str:
    return "head" if name == names.HEAD else "embed" if name == names.EMBED else "shared"


def _by_layer(experts: Iterable[TargetExpert]) -> dict[int, list[TargetExpert]]:
    found: dict[int, list[TargetExpert]] = {}
    for expert in sorted(experts, key=lambda expert: (expert.layer, expert.index)):
        found.setdefault(expert.layer, []).append(expert)
    return found


def _samples(rows: Rows, fmt: WeightFormat, runs: int = _SAMPLE_RUNS) -> list[Sample]:
    """Runs of rows spread over a matrix, at multiples of 16, as one sample."""
    places = -(-rows.count // _RUN_ROWS)
    step = max(1, places // runs)
    starts = [place * _RUN_ROWS for place in range(0, places, step)][:runs]
    found = [rows.floats(start, min(start + _RUN_ROWS, rows.count)) for start in starts]
    return [Sample(np.concatenate(found), fmt)]
