"""RopeSpec from config.json (`rope_scaling`, or transformers 5's `rope_parameters`) and from GGUF metadata.

Formulas of the attention factor: YaRN (arXiv 2309.00071) as transformers' modeling_rope_utils computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from strata.errors import FileFormatError
from strata.model.architectures.fields import MAX_CONTEXT, MAX_HEAD_DIM, Fields
from strata.plan.spec import RopeSpec
from strata.store.source import TensorInfo

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MIN_THETA, MAX_THETA = 2.0, 1e15


def hf_rope_section(config: Fields) -> Fields:
    """The object with the RoPE parameters; `rope_scaling` wins over `rope_parameters` as in transformers."""
    section = config.section("rope_scaling" if config.raw("rope_scaling") else "rope_parameters")
    nested = [key for key, value in section.values.items() if isinstance(value, Mapping)]
    if nested:
        raise config.unsupported(f"RoPE that differs between layers ({', '.join(map(str, nested[:3]))})")
    if section.has("mrope_section"):
        raise config.unsupported("multimodal RoPE (mrope_section)")
    return section


def hf_rope_type(config: Fields) -> str:
    """The RoPE's type, refused by name when it is not one of ROPE_TYPES."""
    section = hf_rope_section(config)
    kind = section.text("rope_type", section.raw("type") or "default")
    if kind not in ROPE_TYPES:
        raise config.unsupported(f"RoPE of type {kind!r}")
    return kind


def hf_partial(config: Fields, default: float = 1.0) -> float:
    """The rotated part of a head, 0 to 1."""
    outer = config.number("partial_rotary_factor", default, 0.0, 1.0)
    return hf_rope_section(config).number("partial_rotary_factor", outer, 0.0, 1.0)


def hf_rope(
    config: Fields, rotary_dim: int, context: int, *, theta: float = 10000.0, interleaved: bool = False
) -> RopeSpec:
    """The RopeSpec of a config.json; `theta` is the family's default."""
    section, kind = hf_rope_section(config), hf_rope_type(config)
    base = section.number(
        "rope_theta", config.number("rope_theta", theta, MIN_THETA, MAX_THETA), MIN_THETA, MAX_THETA
    )
    rope = RopeSpec("default", base, _even(config, rotary_dim), interleaved)
    if kind == "default":
        return rope
    original = config.integer("original_max_position_embeddings", context, high=MAX_CONTEXT)
    original = section.integer("original_max_position_embeddings", original, high=MAX_CONTEXT)
    factor = section.number("factor", context / original if kind == "yarn" else None, 1e-3, 1e6)
    if kind == "linear":
        return RopeSpec("linear", base, rotary_dim, interleaved, factor=factor)
    if kind == "llama3":
        return _llama3(section, rope, factor, original)
    return _yarn(section, rope, factor, original)


def _even(config: Fields, rotary_dim: int) -> int:
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > MAX_HEAD_DIM:
        raise config.unsupported(f"RoPE over {rotary_dim} dimensions (an even number of them is needed)")
    return rotary_dim


def _llama3(section: Fields, rope: RopeSpec, factor: float, original: int) -> RopeSpec:
    low = section.number("low_freq_factor", low=1e-3, high=1e6)
    high = section.number("high_freq_factor", low=1e-3, high=1e6)
    if high <= low:
        raise FileFormatError(
            f"{section.source}: high_freq_factor {high:g} must exceed low_freq_factor {low:g}"
        )
    return RopeSpec(
        "llama3",
        rope.theta,
        rope.rotary_dim,
        rope.interleaved,
        factor=factor,
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(section: Fields, rope: RopeSpec, factor: float, original: int) -> RopeSpec:
    mscale = section.number("mscale", 0.0, 0.0, 100.0)
    mscale_all = section.number("mscale_all_dim", 0.0, 0.0, 100.0)
    temperature = yarn_mscale(factor)
    if mscale and mscale_all:
        temperature = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return RopeSpec(
        "yarn",
        rope.theta,
        rope.rotary_dim,
        rope.interleaved,
        factor=factor,
        original_context=original,
        beta_fast=section.number("beta_fast", 32.0, 0.0, 1e6) or 32.0,
        beta_slow=section.number("beta_slow", 1.0, 0.0, 1e6) or 1.0,
        attention_factor=section.number("attention_factor", temperature, 0.0, 1e3),
        truncate=section.flag("truncate", True),
    )


def gguf_rope(
    meta: Fields,
    rotary_dim: int,
    context: int,
    tensors: Mapping[str, TensorInfo] | None,
    *,
    interleaved: bool = False,
    truncate: bool = True,
    fixed_temperature: bool = False,
) -> RopeSpec:
    """The RopeSpec of GGUF metadata; Llama 3's scaling is found in the tensor rope_freqs.weight.

    fixed_temperature: the writer moved YaRN's temperature into the attention scale (deepseek2).
    """
    base = meta.number("rope.freq_base", 10000.0, MIN_THETA, MAX_THETA)
    rope = RopeSpec("default", base, _even(meta, rotary_dim), interleaved)
    freqs = (tensors or {}).get("rope_freqs.weight")
    if freqs is not None:
        return _llama3_from_factors(meta, rope, freqs)
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0, 1e-3, 1e6), 0.0, 1e6)
    # llama.cpp's own files write 0 or 1 where nothing is scaled.
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind not in ("linear", "yarn"):
        raise meta.unsupported(f"RoPE scaling of type {kind!r}")
    if kind == "linear":
        return RopeSpec("linear", base, rotary_dim, interleaved, factor=factor)
    temperature = 1.0 if fixed_temperature else yarn_mscale(factor)
    return RopeSpec(
        "yarn",
        base,
        rotary_dim,
        interleaved,
        factor=meta.number("rope.scaling.factor", low=1.0, high=1e6),
        original_context=meta.integer("rope.scaling.original_context_length", context, high=MAX_CONTEXT),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0, 0.0, 1e6),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0, 0.0, 1e6),
        attention_factor=temperature * meta.number("rope.scaling.attn_factor", 1.0, 0.0, 1e3),
        truncate=truncate,
    )


def _llama3_from_factors(meta: Fields, rope: RopeSpec, info: TensorInfo) -> RopeSpec:
    """Llama 3.x: the converter wrote divisors of the frequencies instead of the four parameters.

    Every published Llama 3.x has low 1, high 4 and 8192 original positions: with those and the largest
    divisor as the factor the whole table must come out again, else the scaling is one we do not know.
    """
    half = rope.rotary_dim // 2
    if info.dtype != "F32" or info.shape != (half,):
        raise FileFormatError(
            f"{info.file}: rope_freqs.weight is {info.dtype} {info.shape}, expected F32 ({half},)"
        )
    table = np.fromfile(info.file, "<f4", half, offset=info.offset).astype(np.float64)
    if len(table) != half or not np.all(np.isfinite(table)) or table.min() < 1.0:
        raise FileFormatError(f"{info.file}: rope_freqs.weight holds values that are no frequency divisors")
    factor, original = float(table.max()), 8192
    turns = original / (2 * math.pi) * rope.theta ** (-np.arange(half) * 2 / rope.rotary_dim)
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    if not np.allclose(table, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
        raise meta.unsupported("a rope_freqs.weight that is not Llama 3's scaling")
    return _llama3(
        Fields({"low_freq_factor": 1.0, "high_freq_factor": 4.0}, meta.source), rope, factor, original
    )
