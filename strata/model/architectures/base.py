"""One entry of the table of architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.model.architectures.fields import Fields
from strata.model.architectures.gguf import Tensors
from strata.model.architectures.names import Names
from strata.plan.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """How one family is read.

    hf_types: values of config.json's model_type; gguf: value of general.architecture ("" = llama.cpp has
    none of its own). from_hf and from_gguf make the ModelSpec, the names say which tensors hold what.
    hf_memory_names: names of transformers 5's modules where they differ from those on the hub.
    gguf_rotated: llama.cpp's files hold q and k rows in the order of interleaved rotation.
    quantizations: values of quantization_config.quant_method that the family's files may have.
    """

    hf_types: tuple[str, ...]
    from_hf: Callable[[Fields], ModelSpec]
    hf_names: Names
    gguf: str = ""
    from_gguf: Callable[[Fields, Tensors], ModelSpec] | None = None
    gguf_names: Names | None = None
    gguf_rotated: bool = False
    hf_memory_names: Names | None = None
    quantizations: tuple[str, ...] = ("fp8",)
