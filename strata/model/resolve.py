"""From a config.json or GGUF metadata to a ModelSpec and the converter's work list, or a refusal by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strata.errors import FileFormatError, IncompleteError, UnsupportedError
from strata.model.architectures import BY_GGUF, BY_HF_TYPE
from strata.model.architectures.base import Architecture
from strata.model.architectures.fields import MAX_ROUTED, Fields
from strata.model.architectures.further import further_layers, further_spec, further_targets
from strata.model.architectures.lookup import Lookup, Promise
from strata.model.architectures.names import Names
from strata.model.architectures.targets import build_targets
from strata.plan.check import check_spec
from strata.plan.spec import ModelSpec
from strata.store.source import TargetExpert, TargetTensor, TensorInfo

# Names that only a quantization method's files have, and the method.
_METHOD_BY_SUFFIX = (
    (".weight_scale_2", "NVFP4"),
    (".weight_packed", "compressed-tensors"),
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".absmax", "bitsandbytes"),
    (".SCB", "bitsandbytes int8"),
    (".input_scale", "FP8 with fixed activation scales"),
    (".weight_scale", "FP8 with one scale per tensor or channel"),
)
# Tensors that carry no weights of the decoder.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attn_rot_embd\.weight$|^rope_freqs\.weight$|_scale_inv$")
_LAYER = re.compile(r"^(?:model\.layers|blk)\.(\d+)\.")


@dataclass(frozen=True)
class Resolved:
    """A model ready for the converter. `targets` and `experts` are empty when no tensors were given.

    notes: what of the checkpoint is left out, one sentence each.
    """

    spec: ModelSpec
    targets: list[TargetTensor] = field(default_factory=list)
    experts: list[TargetExpert] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def resolve(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo] | None,
    kind: Literal["safetensors", "gguf"],
    *,
    further: bool = False,
) -> Resolved:
    """Resolve a config.json (`kind` "safetensors") or GGUF metadata.

    further: not the model but its first layer that predicts further tokens (MTP).
    Raises UnsupportedError for what Strata does not do, by name; FileFormatError for values that cannot be
    and shapes that disagree; IncompleteError for missing tensors.
    """
    architecture, fields = _find_gguf(config) if kind == "gguf" else _find_hf(config)
    spec = _spec(architecture, fields, tensors, kind)
    try:
        check_spec(spec)
    except ValueError as error:
        raise FileFormatError(f"{fields.source}: {error}") from None
    if sum(spec.moe_layers) * (spec.experts.router.experts if spec.experts else 0) > MAX_ROUTED:
        raise FileFormatError(f"{fields.source}: more than {MAX_ROUTED} experts over all layers")
    if tensors is None:
        return Resolved(spec)
    _refuse_quantized(tensors, fields)
    lookup = Lookup(tensors, fields.source)
    names = _names(architecture, lookup, kind)
    rotated = kind == "gguf" and architecture.gguf_rotated
    targets, experts = build_targets(spec, names, lookup, rotated)
    _refuse_unused(lookup, spec)
    behind = further_layers(tensors, spec.layers)
    if not further:
        return Resolved(spec, targets, experts, _left_out(tensors, behind))
    if not behind:
        raise UnsupportedError(
            f"{lookup.source}: no layer behind the model's {spec.layers} predicts further tokens",
            remedy="convert the model itself, without --further",
        )
    found = further_targets(spec, names, lookup, rotated)
    return Resolved(further_spec(spec), *found, _left_out(tensors, behind[1:]))


def _left_out(tensors: Mapping[str, TensorInfo], layers: Sequence[int]) -> tuple[str, ...]:
    """What is not read: layers that predict further tokens."""
    return tuple(
        f"layer {layer} predicts further tokens (MTP) and is left out, "
        f"{sum(info.nbytes for name, info in tensors.items() if _layer_of(name) == layer)} bytes: --further "
        f"converts the first such layer to a store of its own"
        for layer in layers
    )


def _layer_of(name: str) -> int:
    """The layer that a checkpoint's tensor belongs to; -1: none."""
    found = _LAYER.match(name)
    return int(found.group(1)) if found else -1


def promised(config: Mapping[str, Any]) -> tuple[Resolved, str]:
    """The targets that a checkpoint with this config.json has, by name and shape, and its quantization.

    No weights are there to be looked at: sources are as published, experts are left out. Raises as `resolve`.
    """
    spec = resolve(config, None, "safetensors").spec
    architecture, fields = _find_hf(config)
    targets, _ = build_targets(spec, architecture.hf_names, Promise({}, fields.source), False)
    return Resolved(spec, targets), _quantization(fields)


def _spec(
    architecture: Architecture, fields: Fields, tensors: Mapping[str, TensorInfo] | None, kind: str
) -> ModelSpec:
    if kind != "gguf":
        return architecture.from_hf(fields)
    assert architecture.from_gguf is not None
    return architecture.from_gguf(fields, tensors)


def _names(architecture: Architecture, lookup: Lookup, kind: str) -> Names:
    if kind == "gguf":
        assert architecture.gguf_names is not None
        return architecture.gguf_names
    memory = architecture.hf_memory_names
    if memory is not None and lookup.has(memory["router"].format(i=0) + ".weight"):
        return memory
    return architecture.hf_names


def _find_gguf(config: Mapping[str, Any]) -> tuple[Architecture, Fields]:
    name = Fields(config, "GGUF metadata").text("general.architecture")
    if name not in BY_GGUF:
        raise UnsupportedError(
            f"the GGUF architecture {name[:60]!r} is not supported",
            remedy=f"supported: {', '.join(sorted(BY_GGUF))}",
        )
    return BY_GGUF[name], Fields(config, f"GGUF metadata ({name})", f"{name}.")


def _find_hf(config: Mapping[str, Any]) -> tuple[Architecture, Fields]:
    """The entry of model_type; the quantization is checked first, so that both are named at once."""
    if not config:
        raise IncompleteError(
            "there is no config.json beside the weights", remedy="fetch it with the weights"
        )
    name = config.get("model_type")
    shown = _shown_type(config)
    fields = Fields(config, f"config.json ({shown})")
    method = _quantization(fields)
    if not isinstance(name, str) or name not in BY_HF_TYPE:
        also = f" (quantization {method})" if method else ""
        raise UnsupportedError(
            f"the architecture {shown}{also} is not supported",
            remedy=f"supported model_type: {', '.join(sorted(BY_HF_TYPE))}",
        )
    architecture = BY_HF_TYPE[name]
    if method and method not in architecture.quantizations:
        raise fields.unsupported(f"the quantization {method}")
    return architecture, fields


def _shown_type(config: Mapping[str, Any]) -> str:
    """model_type, or the class name where a config.json has none."""
    name = config.get("model_type")
    classes = config.get("architectures")
    if not isinstance(name, str) and isinstance(classes, list) and classes:
        name = classes[0]
    return name[:60] if isinstance(name, str) else "without model_type"


def _quantization(config: Fields) -> str:
    """The quantization method that config.json names; "" for none, "fp8" and "mxfp4" where readable."""
    nested = config.section("text_config") if isinstance(config.raw("text_config"), Mapping) else config
    outer = config if config.has("quantization_config") else nested
    if not outer.has("quantization_config"):
        return ""
    section = outer.section("quantization_config")
    method = section.text("quant_method", "of an unnamed method")
    algorithm = section.text("quant_algo", section.text("moe_quant_algo", ""))
    if algorithm:
        return f"{algorithm} ({method})"
    if method == "fp8":
        return _fp8(section)
    return method


def _fp8(section: Fields) -> str:
    """ "fp8" when it is E4M3 with a scale per two-dimensional block, else what it is."""
    block = section.items("weight_block_size")
    if block is None or len(block) != 2:
        return "fp8 without weight_block_size"
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fp8 in {section.text('fmt')}"
    if section.text("activation_scheme", "dynamic") != "dynamic":
        return "fp8 with fixed activation scales"
    return "fp8"


def _refuse_quantized(tensors: Mapping[str, TensorInfo], fields: Fields) -> None:
    """Quantized files whose config.json does not say so (ModelOpt keeps that in another file)."""
    for suffix, method in _METHOD_BY_SUFFIX:
        name = next((n for n in tensors if n.endswith(suffix)), None)
        if name is not None:
            raise UnsupportedError(
                f"{fields.source}: the quantization {method} (tensor {name}) is not supported",
                remedy="take the model in BF16, or a GGUF file of it",
            )


def _refuse_unused(lookup: Lookup, spec: ModelSpec) -> None:
    """A tensor that nothing reads means a model we would compute wrongly."""
    for name in lookup.tensors:
        if name in lookup.used or _IGNORED.search(name):
            continue
        if spec.tied_head and name == "lm_head.weight":
            continue
        if _layer_of(name) >= spec.layers:  # layers that predict further tokens (MTP)
            continue
        raise UnsupportedError(
            f"{lookup.source}: tensor {name} is no part of {spec.architecture} as Strata knows it",
            remedy="take the weights as their publisher has them, without additions",
        )
