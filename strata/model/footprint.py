"""A model's Footprint from a store's manifest, from a checkpoint's headers, or from a config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.backends.base import KvSpec
from strata.errors import UnsupportedError
from strata.memory.regions import aligned
from strata.model.counts import expert_parameters
from strata.model.resolve import Resolved, promised
from strata.plan.activations import row_elements, scratch_bytes
from strata.plan.footprint import Attention, Footprint
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.formats import FORMATS, expert_slices
from strata.store.manifest import LayerRecord, Manifest, TensorRecord
from strata.store.options import ConvertOptions, choose
from strata.store.planning import Planner
from strata.store.source import CheckpointSource

_BF16 = {"BF16"}


@dataclass(frozen=True)
class Contents:
    """What a store holds, or would: tensors and layers. notes: what differs from what was asked."""

    spec: ModelSpec
    tensors: Mapping[str, TensorRecord]
    layers: Mapping[int, LayerRecord]
    notes: tuple[str, ...] = ()


def contents_of_store(manifest: Manifest, *, further: bool = False) -> Contents:
    """Of a converted model. further: it may be a layer that predicts further tokens of one, which is
    UnsupportedError else."""
    if manifest.spec.further and not further:
        raise UnsupportedError(
            f"{manifest.spec.name} is one layer that predicts further tokens (MTP head), no model",
            remedy="run the model that it belongs to, with this one as its draft: strata run MODEL -md STORE",
        )
    return Contents(manifest.spec, manifest.tensors, manifest.layers)


def contents_of_checkpoint(source: CheckpointSource, found: Resolved, options: ConvertOptions) -> Contents:
    """Of the store that a conversion would make; headers and one row per data type are read."""
    plan = Planner(source, found.spec, options).plan(found.targets, found.experts)
    return Contents(found.spec, plan.tensors, plan.layers, tuple(plan.notes))


def contents_of_config(config: Mapping[str, Any], options: ConvertOptions) -> Contents:
    """Of the store that a conversion of this config.json's weights would make; they need not be there.

    Weights are taken as BF16, experts of an MXFP4 checkpoint as MXFP4.
    """
    found, quantization = promised(config)
    spec = found.spec
    tensors = {}
    for target in found.targets:
        if target.kind == "plain":
            tensors[target.name] = TensorRecord(target.shape, "BF16", True, "BF16")
        else:
            layer = int(target.name.split(".")[1]) if target.name.startswith("layers.") else None
            chosen = choose(options, target.kind, layer, {None}, _BF16).format
            tensors[target.name] = TensorRecord(target.shape, chosen.name, False, "BF16")
    kept = quantization if quantization == "mxfp4" else None
    types = {"MXFP4"} if kept else _BF16
    layers = {
        layer: _layer_record(
            spec, choose(options, "experts", layer, {kept}, types).format.name, options.slices
        )
        for layer in range(spec.layers)
        if spec.is_moe(layer)
    }
    slices = {record.slices for record in layers.values()} - {options.slices}
    notes = [
        f"experts: {n} slice instead of {options.slices}: the width cannot be cut at groups" for n in slices
    ]
    return Contents(spec, tensors, layers, tuple(notes))


def _layer_record(spec: ModelSpec, fmt: str, wanted: int) -> LayerRecord:
    experts = spec.experts
    assert experts is not None
    slices = expert_slices(experts.width, FORMATS[fmt], wanted)
    return LayerRecord(fmt, fmt, spec.hidden, experts.width, slices, experts.biases, False, "BF16")


def footprint(contents: Contents, kv: KvSpec) -> Footprint:
    """The numbers that planning needs."""
    spec = contents.spec
    sizes = {name: _size(record) for name, record in contents.tensors.items()}
    embedding = sizes.pop(names.EMBED)
    head = sizes.pop(names.HEAD, embedding)
    records = [record.layout().record_bytes for record in contents.layers.values()]
    router = spec.experts.router if spec.experts and contents.layers else None
    return Footprint(
        name=spec.name,
        layers=spec.layers,
        moe_layers=len(contents.layers),
        hidden=spec.hidden,
        vocab=spec.vocab,
        context=spec.context,
        static=sum(nbytes for nbytes, _ in sizes.values()),
        static_macs=sum(macs for _, macs in sizes.values()),
        head=head[0],
        head_macs=head[1],
        embedding=embedding[0],
        tied=names.HEAD not in contents.tensors,
        experts=router.experts if router else 0,
        top_k=router.top_k if router else 0,
        expert_bytes=max(records, default=0),
        expert_macs=expert_parameters(spec) if router else 0,
        expert_total=sum(records) * (router.experts if router else 0),
        slices=min((record.slices for record in contents.layers.values()), default=1),
        attention=_attention(spec, kv),
        kv_dtype=kv.dtype,
        page_tokens=kv.page_tokens,
        activation_bytes=4 * max(_widest(spec, kv), row_elements(spec, kv.key_dim, kv.value_dim)),
        scratch_bytes=scratch_bytes(spec, kv.kv_heads, kv.value_dim),
        notes=contents.notes,
        further=spec.further,
    )


def _size(record: TensorRecord) -> tuple[int, int]:
    """Bytes in memory, in whole lines, and multiply-adds per token. The router is plain and still a matrix.

    Plain tensors become f32 when they are loaded, whatever the store holds.
    """
    values = 1
    for size in record.shape:
        values *= size
    nbytes = 4 * values if record.plain else record.packed_shape().nbytes
    return aligned(nbytes), values if len(record.shape) == 2 else 0


def _attention(spec: ModelSpec, kv: KvSpec) -> Attention:
    windows = spec.attention.sliding_window or (0,) * spec.layers
    return Attention(
        windows=tuple(windows),
        macs=spec.attention.heads * (kv.key_dim + kv.value_dim),
        # Rounded up: only pages of an unusual number of tokens (no power of two) leave a rest.
        new_bytes=-(-kv.layer_bytes // kv.page_tokens),
    )


def _widest(spec: ModelSpec, kv: KvSpec) -> int:
    """Elements that a token occupies at most: residual, branch, normed input; attention or experts."""
    a, experts = spec.attention, spec.experts
    value = a.mla.v_head_dim if a.mla else a.head_dim
    attention = a.heads * (kv.key_dim + value) + kv.kv_heads * (kv.key_dim + kv.value_dim)
    ffn = 3 * spec.dense_width
    if experts is not None:
        routed = experts.router.top_k * (3 * experts.width + spec.hidden) + experts.router.experts
        ffn = max(ffn, routed + 3 * experts.shared_width)
    return 3 * spec.hidden + max(attention, ffn)
