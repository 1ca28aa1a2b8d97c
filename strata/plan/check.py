"""Whether a ModelSpec's numbers can belong to one model: the last word on every spec, wherever it came from.

Types are not looked at. Sizes that a weight's shape must equal are left to the loader, which compares them.
"""

from __future__ import annotations

import dataclasses
import math

from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RouterSpec

MAX_SIZE = 1 << 27
"""Ceiling of every size: far above every published model, and few enough to multiply three of them."""


def check_spec(spec: ModelSpec) -> None:
    """Raises ValueError naming the field, its value and what is allowed."""
    _check_numbers("", spec)
    for name in ("layers", "hidden", "vocab", "context"):
        _check_range(name, getattr(spec, name), 1, MAX_SIZE)
    _check_range("dense_width", spec.dense_width, 0, MAX_SIZE)
    for name, entries in (
        ("moe_layers", spec.moe_layers),
        ("attention.sliding_window", spec.attention.sliding_window),
    ):
        if entries and len(entries) != spec.layers:
            raise ValueError(f"{name} has {len(entries)} entries for {spec.layers} layers")
    if any(spec.moe_layers) and spec.experts is None:
        raise ValueError("layers route, but experts is null")
    _check_attention(spec.attention)
    if spec.experts is not None:
        _check_experts(spec.experts)


def _check_numbers(where: str, part: object) -> None:
    """Every float is finite, in nested parts too."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]  # only called with dataclasses
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            _check_numbers(f"{where}{field.name}.", value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}{field.name} is {value}, expected a finite number")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, expected {low} to {high}")


def _check_attention(attention: AttentionSpec) -> None:
    for name in ("heads", "kv_heads", "head_dim"):
        _check_range(f"attention.{name}", getattr(attention, name), 1, MAX_SIZE)
    if attention.heads % attention.kv_heads:
        raise ValueError(
            f"attention.heads is {attention.heads}, no multiple of kv_heads, which is {attention.kv_heads}"
        )
    for window in attention.sliding_window:
        _check_range("attention.sliding_window", window, 0, MAX_SIZE)
    mla = attention.mla
    if mla is not None:
        _check_range("attention.mla.q_lora_rank", mla.q_lora_rank, 0, MAX_SIZE)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _check_range(f"attention.mla.{name}", getattr(mla, name), 1, MAX_SIZE)
    _check_rope(attention)


def _check_rope(attention: AttentionSpec) -> None:
    rope = attention.rope
    widest = attention.head_dim if attention.mla is None else attention.mla.qk_rope_head_dim
    _check_range("attention.rope.rotary_dim", rope.rotary_dim, 0, widest)
    if rope.rotary_dim % 2:
        raise ValueError(f"attention.rope.rotary_dim is {rope.rotary_dim}, expected an even number")
    for name in ("theta", "factor"):
        if not getattr(rope, name) > 0:
            raise ValueError(f"attention.rope.{name} is {getattr(rope, name)}, expected more than 0")
    if rope.type == "yarn" and not (rope.beta_fast > 0 and rope.beta_slow > 0 and rope.theta > 1):
        raise ValueError(
            f"attention.rope: theta {rope.theta}, beta_fast {rope.beta_fast} and beta_slow {rope.beta_slow}, "
            "YaRN takes their logarithms: expected more than 1, 0 and 0"
        )
    if rope.type == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise ValueError(
            f"attention.rope.low_freq_factor is {rope.low_freq_factor}, expected more than 0 and less than "
            f"high_freq_factor, which is {rope.high_freq_factor}"
        )
    lowest = 1 if rope.type in ("llama3", "yarn") else 0
    _check_range("attention.rope.original_context", rope.original_context, lowest, MAX_SIZE)


def _check_experts(experts: ExpertSpec) -> None:
    _check_range("experts.width", experts.width, 1, MAX_SIZE)
    _check_range("experts.shared_width", experts.shared_width, 0, MAX_SIZE)
    _check_router(experts.router)


def _check_router(router: RouterSpec) -> None:
    _check_range("experts.router.experts", router.experts, 1, MAX_SIZE)
    _check_range("experts.router.groups", router.groups, 1, router.experts)
    if router.experts % router.groups:
        raise ValueError(f"{router.experts} experts cannot be in {router.groups} groups of one size")
    _check_range("experts.router.top_groups", router.top_groups, 1, router.groups)
    eligible = router.experts // router.groups * router.top_groups
    _check_range("experts.router.top_k", router.top_k, 1, eligible)
