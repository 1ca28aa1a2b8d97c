"""Layers that predict further tokens (MTP heads; "nextn" in GGUF), as a small model of their own.

Such a layer reads the hidden state of the last token and the embedding of the next one, both normed, and
joins them; one decoder layer, a norm and the output matrix then give the token after the next. Names as in
vLLM's glm4_moe_mtp.py and deepseek_mtp.py, and in llama.cpp's gguf-py (nextn).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from strata.model.architectures.lookup import Lookup
from strata.model.architectures.names import Names
from strata.model.architectures.targets import Builder
from strata.plan.spec import FURTHER, ModelSpec
from strata.store import names as store
from strata.store.source import TargetExpert, TargetTensor, TensorInfo

_HF: Names = {
    "further.join": "model.layers.{i}.eh_proj",
    "further.embed_norm": "model.layers.{i}.enorm",
    "further.hidden_norm": "model.layers.{i}.hnorm",
    "further.norm": "model.layers.{i}.shared_head.norm",
    "further.embed": "model.layers.{i}.embed_tokens",
    "further.head": "model.layers.{i}.shared_head.head",
}
_GGUF: Names = {
    "further.join": "blk.{i}.nextn.eh_proj",
    "further.embed_norm": "blk.{i}.nextn.enorm",
    "further.hidden_norm": "blk.{i}.nextn.hnorm",
    "further.norm": "blk.{i}.nextn.shared_head_norm",
    "further.embed": "blk.{i}.nextn.embed_tokens",
    "further.head": "blk.{i}.nextn.shared_head_head",
}
_LAYER = re.compile(r"^(?:model\.layers|blk)\.(\d+)\.")


def further_layers(tensors: Mapping[str, TensorInfo], layers: int) -> tuple[int, ...]:
    """Indices of what lies behind the decoder's `layers` layers in a checkpoint."""
    found = {int(match.group(1)) for name in tensors if (match := _LAYER.match(name))}
    return tuple(sorted(index for index in found if index >= layers))


def further_spec(spec: ModelSpec) -> ModelSpec:
    """The head's: one layer like the model's last one, with its own embedding and output matrix."""
    windows = spec.attention.sliding_window[-1:]
    name = spec.architecture + FURTHER
    return replace(
        spec,
        architecture=name,
        name=name if spec.name == spec.architecture else spec.name + FURTHER,
        layers=1,
        attention=replace(spec.attention, sliding_window=windows),
        moe_layers=spec.moe_layers[-1:],
        tied_head=False,
    )


def further_targets(
    spec: ModelSpec, names: Names, lookup: Lookup, rotated: bool
) -> tuple[list[TargetTensor], list[TargetExpert]]:
    """What the first head of a checkpoint is made of; `spec` is the model's.

    Embedding and output matrix are the head's own where the file has them, else the model's. Raises as
    `Lookup.take`: IncompleteError where tensors of the head are missing.
    """
    index = spec.layers
    names = {**names, **(_GGUF if names["embed"] == "token_embd" else _HF)}
    longer = replace(
        spec,
        layers=index + 1,
        moe_layers=(*spec.moe_layers, *spec.moe_layers[-1:]),
        attention=replace(
            spec.attention,
            sliding_window=(*spec.attention.sliding_window, *spec.attention.sliding_window[-1:]),
        ),
    )
    builder = Builder(longer, names, lookup, rotated)
    builder.layer(index)
    builder.matrix(store.EMBED, _own(builder, "embed", "embed"), spec.vocab, spec.hidden, kind="embed")
    tied = "embed" if spec.tied_head else "head"
    builder.matrix(store.HEAD, _own(builder, "head", tied), spec.vocab, spec.hidden, kind="head")
    builder.vector(store.FINAL_NORM, "further.norm.weight", spec.hidden)
    builder.vector(store.EMBED_NORM, "further.embed_norm.weight", spec.hidden)
    builder.vector(store.HIDDEN_NORM, "further.hidden_norm.weight", spec.hidden)
    _join(builder, spec.hidden)
    first = store.layer(index, "")
    targets = [
        replace(target, name=store.layer(0, target.name[len(first) :]))
        if target.name.startswith(first)
        else target
        for target in builder.targets
    ]
    return targets, [replace(expert, layer=0) for expert in builder.experts]


def _join(builder: Builder, hidden: int) -> None:
    """The two halves of the matrix that joins embedding and hidden state, each on its own."""
    halves = ((store.JOIN_EMBED, 0, hidden), (store.JOIN_HIDDEN, hidden, 2 * hidden))
    for name, start, stop in halves:
        source = builder.source("further.join.weight", (hidden, 2 * hidden), col_start=start, col_stop=stop)
        builder.add(name, (source,), (hidden, hidden), "shared")


def _own(builder: Builder, part: str, otherwise: str) -> str:
    """The head's own matrix, or the model's."""
    own = builder.names[f"further.{part}"].format(i=builder.index) + ".weight"
    return f"further.{part}" if builder.lookup.has(own) else otherwise
