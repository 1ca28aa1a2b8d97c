"""Totals of a store or of a checkpoint: parameters, experts, bytes and formats by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.manifest import LayerRecord, Manifest
from strata.store.rows import matrix_shape
from strata.store.source import CheckpointSource, SourceRows, TargetExpert, TargetTensor

PARTS = ("embed", "head", "shared", "experts", "plain")


@dataclass
class PartSummary:
    """One part of a model. formats: how many bytes are in which format."""

    parameters: int = 0
    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)

    def add(self, parameters: int, nbytes: int, fmt: str) -> None:
        """Count a tensor."""
        self.parameters += parameters
        self.bytes += nbytes
        self.formats[fmt] = self.formats.get(fmt, 0) + nbytes


@dataclass(frozen=True)
class Summary:
    """What `strata inspect` shows. parts: those of PARTS it has ("plain": norms, routers, biases).

    expert_bytes: smallest and largest expert (0, 0 for dense models); experts: per layer that routes.
    """

    architecture: str
    name: str
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    parameters: int
    bytes: int
    expert_bytes: tuple[int, int]
    parts: dict[str, PartSummary]


def inspect_store(manifest: Manifest) -> Summary:
    """Totals of an opened store; parameters count logical values, bytes are those on disk with padding."""
    parts = {part: PartSummary() for part in PARTS}
    sizes = {entry.name: entry.nbytes for entry in manifest.shards()[0].entries}
    for name, record in manifest.tensors.items():
        part = "plain" if record.plain else {names.EMBED: "embed", names.HEAD: "head"}.get(name, "shared")
        values = 1
        for size in record.shape:
            values *= size
        parts[part].add(values, sizes[name], record.format)
    for layer in manifest.layers.values():
        _add_layer(parts["experts"], layer, manifest.expert_count)
    records = [layer.layout().record_bytes for layer in manifest.layers.values()]
    return _summary(manifest.spec, parts, records)


def _add_layer(part: PartSummary, layer: LayerRecord, count: int) -> None:
    layout = layer.layout()
    biases = 2 * layer.width + layer.hidden if layer.biases else 0
    matrices = (
        (2 * layer.width * layer.hidden, layout.slices * layout.gate_up.nbytes, layer.gate_up),
        (layer.width * layer.hidden, layout.slices * layout.down.nbytes, layer.down),
        (biases, layout.record_bytes - layout.slices * layout.slice_bytes, "F32" if biases else "padding"),
    )
    for values, nbytes, fmt in matrices:
        if nbytes:
            part.add(count * values, count * nbytes, fmt)


def inspect_source(
    source: CheckpointSource,
    spec: ModelSpec,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
) -> Summary:
    """Totals of a checkpoint, counted over what its conversion would read."""
    parts = {part: PartSummary() for part in PARTS}
    for target in targets:
        for block in target.sources:
            parts[target.kind].add(*_block_size(source, block))
    sizes = []
    for expert in experts:
        sizes.append(0)
        for block in _expert_blocks(expert):
            values, nbytes, dtype = _block_size(source, block)
            parts["experts"].add(values, nbytes, dtype)
            sizes[-1] += nbytes
    return _summary(spec, parts, sizes)


def _expert_blocks(expert: TargetExpert) -> Iterable[SourceRows]:
    biases = (expert.gate_bias, expert.up_bias, expert.down_bias)
    return (expert.gate, expert.up, expert.down, *(bias for bias in biases if bias is not None))


def _block_size(source: CheckpointSource, block: SourceRows) -> tuple[int, int, str]:
    """Values, bytes in the file and dtype of a block."""
    info = source.tensors[block.name]
    rows, cols = matrix_shape(info.shape)
    taken_rows = len(range(block.start, rows if block.stop is None else block.stop, block.stride))
    taken_cols = len(
        range(block.col_start, cols if block.col_stop is None else block.col_stop, block.col_stride)
    )
    values = taken_rows * taken_cols
    return values, info.nbytes * values // max(1, rows * cols), info.dtype


def _summary(spec: ModelSpec, parts: dict[str, PartSummary], expert_sizes: Sequence[int]) -> Summary:
    router = spec.experts.router if spec.experts else None
    present = {name: part for name, part in parts.items() if part.bytes}
    return Summary(
        architecture=spec.architecture,
        name=spec.name,
        layers=spec.layers,
        moe_layers=sum(spec.moe_layers),
        experts=router.experts if router else 0,
        top_k=router.top_k if router else 0,
        parameters=sum(part.parameters for part in present.values()),
        bytes=sum(part.bytes for part in present.values()),
        expert_bytes=(min(expert_sizes), max(expert_sizes)) if expert_sizes else (0, 0),
        parts=present,
    )
