"""Decides, from headers alone, what a store will contain: formats, layouts, sizes, and what must differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from strata.errors import FileFormatError, IncompleteError, UsageError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.calibrated import Calibrated, Planned
from strata.store.calibration import CalibrationStats
from strata.store.clipping import clipped, clipped_expert, is_w8
from strata.store.formats import FORMATS, WeightFormat, expert_slices
from strata.store.manifest import SHARED, LayerRecord, TensorRecord
from strata.store.options import AUTO, Choice, ConvertOptions, choose, parse_override
from strata.store.rows import BlockRows, ValueGuard, format_kept
from strata.store.scaled_rows import NONE
from strata.store.source import (
    CheckpointSource,
    QuantizedRows,
    SourceRows,
    TargetExpert,
    TargetTensor,
)
from strata.store.stacking import target_rows
from strata.store.tasks import Coding, ExpertCoding, Task, expert_task, packed_task, plain_task
from strata.store.treatment import PLAIN, PLAIN_EXPERT, ExpertTreatment, Treatment

_ABSENT = {
    "experts": "no routed experts",
    "head": "no output matrix of its own: the embedding is used",
}
_FLOAT_TYPES = {"bf16": {"BF16"}, "f16": {"F16"}, "F32": {"F32", "F16", "BF16"}, "BF16": {"BF16"}}


@dataclass
class ConversionPlan:
    """The future store. notes: sentences about parts that got another format or fewer slices than meant."""

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    expert_count: int = 0
    notes: list[str] = field(default_factory=list)


class Planner:
    """Plans one conversion and makes the tasks that carry it out."""

    def __init__(
        self,
        source: CheckpointSource,
        spec: ModelSpec,
        options: ConvertOptions,
        stats: CalibrationStats | None = None,
    ) -> None:
        """stats: for methods that need them; they must be this model's (`check_stats`)."""
        self._source, self._spec, self._options, self._stats = source, spec, options, stats
        self._calibrated: Calibrated | None = None
        self._probes: dict[str, QuantizedRows | None] = {}
        self._kept: dict[str | int, tuple[bool, ...]] = {}
        self._notes: Counter[str] = Counter()

    def plan(self, targets: Sequence[TargetTensor], experts: Sequence[TargetExpert]) -> ConversionPlan:
        """Raises FileFormatError where source and model disagree."""
        plan = ConversionPlan()
        for target in targets:
            plan.tensors[target.name] = self._tensor(target)
        layers: dict[int, list[TargetExpert]] = {}
        for expert in experts:
            layers.setdefault(expert.layer, []).append(expert)
        plan.expert_count = self._spec.experts.router.experts if self._spec.experts and layers else 0
        for layer, found in layers.items():
            self._check_complete(layer, found, plan.expert_count)
            plan.layers[layer] = self._layer(layer, found)
        self._check_overrides(targets, plan.layers)
        if self._options.calibrated and self._stats is not None:
            self._calibrate(self._stats, plan, targets, experts)
        self._check_clip(targets, plan)
        self._note_absent(targets, plan)
        plan.notes = [f"{note} ({n} times)" if n > 1 else note for note, n in self._notes.items()]
        return plan

    def _calibrate(
        self,
        stats: CalibrationStats,
        plan: ConversionPlan,
        targets: Sequence[TargetTensor],
        experts: Sequence[TargetExpert],
    ) -> None:
        planned = Planned(dict(plan.tensors), dict(plan.layers))
        self._calibrated = Calibrated(
            self._source, self._spec, self._options, stats, planned, targets, experts
        )
        for name in self._calibrated.rescaled:
            plan.tensors[name] = replace(plan.tensors[name], format="F32", exact=False)

    def task(self, target: TargetTensor, record: TensorRecord) -> Task:
        """The work of one shared tensor."""
        allow_nan = self._options.allow_nan
        if record.plain:
            scaling = self._calibrated.plain(target.name) if self._calibrated else NONE
            return plain_task(self._source, target, SHARED, record.format, allow_nan, scaling)
        how = self.treatment(target.name)
        kept, label = self._kept[target.name][0], _named(target.sources)
        rounding = how.rounding
        if self._options.clip is not None and self._options.clips(target.kind):
            rounding = clipped(self._options.clip, rounding)
        coding = Coding(record.packed_shape(), kept, label, rounding)
        return packed_task(self._source, target, SHARED, coding, allow_nan, how.scaling)

    def expert_task(self, target: TargetExpert, record: LayerRecord) -> Task:
        """The work of one expert."""
        coding = ExpertCoding(record.layout(), *self._kept[target.layer])
        file, allow_nan = names.expert_file(target.index), self._options.allow_nan
        treat: Callable[[TargetExpert], ExpertTreatment] = self.expert_treatment
        if self._options.clip is not None and self._options.clips("experts"):
            treat = clipped_expert(self._options.clip, treat)
        return expert_task(self._source, target, file, coding, allow_nan, treat)

    def _check_overrides(self, targets: Sequence[TargetTensor], experts: Collection[int]) -> None:
        """UsageError where a format was asked for of something that no layer in question has."""
        there = {("experts", layer) for layer in experts}
        for target in targets:
            layer, matrix = names.place(target.name)
            if layer is not None and target.kind != "plain":
                there |= {(target.kind, layer), (matrix, layer)}
        for key, value in self._options.overrides.items():
            name, first, last = parse_override(key)
            layers = sorted(layer for part, layer in there if part == name)
            if not any(first <= layer <= last for layer in layers):
                found = f"{name} is in layers {layers[0]} to {layers[-1]}" if layers else f"it has no {name}"
                raise UsageError(
                    f"{key}={value} names nothing that this model has",
                    remedy=f"{found}; the first layer is 0",
                )

    def _note_absent(self, targets: Sequence[TargetTensor], plan: ConversionPlan) -> None:
        """Formats that were asked for of parts which the model has not."""
        there = {target.kind for target in targets} | ({"experts"} if plan.layers else set())
        for part, remark in _ABSENT.items():
            asked = getattr(self._options, part)
            if asked != AUTO and part not in there:
                self._notes[f"{part}: {asked} has no effect, {self._spec.name} has {remark}"] += 1

    def _check_clip(self, targets: Sequence[TargetTensor], plan: ConversionPlan) -> None:
        """UsageError where a percentile was asked for and cuts nothing off that is multiplied."""
        if self._options.clip is None:
            return
        formats = [(target.kind, plan.tensors[target.name].format) for target in targets]
        formats = [(kind, fmt) for kind, fmt in formats if kind != "plain"]
        for record in plan.layers.values():
            formats += [("experts", record.gate_up), ("experts", record.down)]
        multiplied = {"experts", "shared", "embed" if self._spec.tied_head else "head"}
        eight = {kind for kind, fmt in formats if is_w8(FORMATS[fmt])} & multiplied
        if any(self._options.clips(kind) for kind in eight):
            return
        found = ", ".join(sorted({fmt for _, fmt in formats}))
        gptq = f" but {', '.join(sorted(eight))}, which gptq finds its own scales for" if eight else ""
        raise UsageError(
            f"clip is {self._options.clip:g}, and nothing is in w8{gptq}: {found}",
            remedy="it is for w8 without gptq; four-bit scales are searched for the least error",
        )

    def treatment(self, name: str) -> Treatment:
        """The factors and the rounding of a packed matrix of the shared file; what `clip` cuts off apart."""
        return self._calibrated.matrix(name) if self._calibrated else PLAIN

    def expert_treatment(self, target: TargetExpert) -> ExpertTreatment:
        """Likewise of an expert."""
        return self._calibrated.expert(target) if self._calibrated else PLAIN_EXPERT

    def _tensor(self, target: TargetTensor) -> TensorRecord:
        guard = ValueGuard(allow_nan=True)
        blocks = [BlockRows(self._source, block, guard) for block in target.sources]
        types = self._types(target.sources)
        source = "/".join(sorted(types))
        if target.kind == "plain":
            dtype = "BF16" if types == {"BF16"} else "F32"
            self._check_size(target, sum(block.count * block.cols for block in blocks))
            return TensorRecord(target.shape, dtype, types <= _FLOAT_TYPES[dtype], source)
        rows = target_rows(self._source, target, guard, 0)
        if not target.interleave:
            self._check_size(target, rows.count * rows.cols)
        layer, matrix = names.place(target.name)
        kept = self._keepable(target.sources)
        choice = choose(self._options, target.kind, layer, kept, types, matrix)
        self._note(target.kind, choice)
        self._kept[target.name] = (choice.kept,)
        return TensorRecord((rows.count, rows.cols), choice.format.name, self._exact(choice, types), source)

    def _layer(self, layer: int, experts: Sequence[TargetExpert]) -> LayerRecord:
        gate_up_blocks = [block for expert in experts for block in (expert.gate, expert.up)]
        down_blocks = [expert.down for expert in experts]
        gate_up, gate_up_exact = self._choice(layer, gate_up_blocks)
        down, down_exact = self._choice(layer, down_blocks)
        self._kept[layer] = (gate_up.kept, down.kept)
        hidden, width = self._expert_sizes(experts[0])
        self._check_expert_sizes(experts, hidden, width)
        return LayerRecord(
            gate_up=gate_up.format.name,
            down=down.format.name,
            hidden=hidden,
            width=width,
            slices=self._slices(width, down.format),
            biases=experts[0].down_bias is not None,
            exact=gate_up_exact and down_exact,
            source="/".join(sorted(self._types([*gate_up_blocks, *down_blocks]))),
        )

    def _choice(self, layer: int, blocks: Sequence[SourceRows]) -> tuple[Choice, bool]:
        types = self._types(blocks)
        choice = choose(self._options, "experts", layer, self._keepable(blocks), types)
        self._note("experts", choice)
        return choice, self._exact(choice, types)

    def _types(self, blocks: Sequence[SourceRows]) -> set[str]:
        return {self._source.tensors[block.name].dtype for block in blocks}

    def _keepable(self, blocks: Sequence[SourceRows]) -> set[str | None]:
        return {format_kept(self._source, block, self._probes) for block in blocks}

    def _exact(self, choice: Choice, types: set[str]) -> bool:
        if choice.kept:
            return all(probe.exact for dtype in types if (probe := self._probes[dtype]) is not None)
        return types <= _FLOAT_TYPES.get(choice.format.name, set())

    def _note(self, part: str, choice: Choice) -> None:
        if choice.note:
            self._notes[f"{part}: {choice.note}"] += 1

    def _slices(self, width: int, down: WeightFormat) -> int:
        wanted = self._options.slices
        slices = expert_slices(width, down, wanted)
        if slices != wanted:
            self._notes[
                f"experts: {slices} slice instead of {wanted}: width {width} is no multiple of "
                f"{wanted} x {down.col_align} ({down.name})"
            ] += 1
        return slices

    def _expert_sizes(self, expert: TargetExpert) -> tuple[int, int]:
        down = BlockRows(self._source, expert.down, ValueGuard(allow_nan=True))
        return down.count, down.cols

    def _check_expert_sizes(self, experts: Sequence[TargetExpert], hidden: int, width: int) -> None:
        guard = ValueGuard(allow_nan=True)
        for expert in experts:
            parts = ((expert.gate, width, hidden), (expert.up, width, hidden), (expert.down, hidden, width))
            for block, rows, cols in parts:
                found = BlockRows(self._source, block, guard)
                if (found.count, found.cols) != (rows, cols):
                    raise FileFormatError(
                        f"{self._source.path}: expert {expert.index} of layer {expert.layer}: "
                        f"{block.name} gives [{found.count}, {found.cols}], not [{rows}, {cols}]",
                        remedy="the configuration does not fit these weights: wrong or damaged config.json?",
                    )

    def _check_complete(self, layer: int, experts: Sequence[TargetExpert], count: int) -> None:
        found = sorted(expert.index for expert in experts)
        if found != list(range(count)):
            raise IncompleteError(
                f"layer {layer} has experts {found[:3]}... ({len(found)}), the model has {count}"
            )

    def _check_size(self, target: TargetTensor, found: int) -> None:
        wanted = 1
        for size in target.shape:
            wanted *= size
        if wanted != found:
            raise FileFormatError(
                f"{self._source.path}: {target.name} is {list(target.shape)} ({wanted} values) by the "
                f"configuration, its source {_named(target.sources)} has {found}",
                remedy="the configuration does not fit these weights: wrong or damaged config.json?",
            )


def _named(blocks: Sequence[SourceRows]) -> str:
    return " + ".join(dict.fromkeys(block.name for block in blocks))
