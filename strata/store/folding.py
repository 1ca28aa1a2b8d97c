"""Where input channels can be rescaled without changing what the model computes.

A matrix that reads x may read x / s instead, when its column j is multiplied by s_j and what made x_j is
divided by s_j. Exact (but for the rounding of one multiplication in f32):

- a norm and all that read its output: attention's projections; a dense FFN's gate and up; of a MoE layer the
  experts, the shared expert, its gate and the router, whose columns are multiplied in f32; q_a's norm and
  q_b; the final norm and an untied head;
- up and down: silu(gate) * up is linear in up;
- v and the output projection: attention averages values; heads that share a value head share its factors.

Not exact, and left alone: up of a clamped SwiGLU (gpt-oss), v where clip_qkv cuts it off, the latent of MLA
(its norm feeds the absorbed k_b by rows), the embedding, a tied head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata.plan.spec import ModelSpec
from strata.store import names

Floats = NDArray[np.float32]
Place = Literal["norm", "up", "value"]


@dataclass(frozen=True)
class Fold:
    """One place. maker: what is divided: a norm, or rows of a matrix (up's, v's). readers: the packed
    matrices whose columns are multiplied; plain: likewise tensors that stay BF16/F32. experts: the layer's
    routed experts read it, too (place "norm"), or are maker and reader themselves (place "up", both empty).
    """

    place: Place
    layer: int | None
    maker: str
    readers: tuple[str, ...]
    plain: tuple[str, ...] = ()
    experts: bool = False


def folds(spec: ModelSpec) -> tuple[Fold, ...]:
    """Every exact place of a model."""
    found = [fold for layer in range(spec.layers) for fold in (*_attention(spec, layer), *_ffn(spec, layer))]
    if not spec.tied_head:
        found.append(Fold("norm", None, names.FINAL_NORM, (names.HEAD,)))
    return tuple(found)


def _attention(spec: ModelSpec, layer: int) -> Iterator[Fold]:
    def part(name: str) -> str:
        return names.layer(layer, f"attn.{name}.weight")

    norm, mla = names.layer(layer, "attn_norm.weight"), spec.attention.mla
    if mla is None:
        yield Fold("norm", layer, norm, (part("qkv"),))
        if spec.attention.clip_qkv is None:
            yield Fold("value", layer, part("qkv"), (part("out"),))
        return
    yield Fold("norm", layer, norm, (part("q_a" if mla.q_lora_rank else "q"), part("kv_a")))
    if mla.q_lora_rank:
        yield Fold("norm", layer, part("q_a_norm"), (part("q_b"),))
    yield Fold("value", layer, part("v_b"), (part("out"),))


def _ffn(spec: ModelSpec, layer: int) -> Iterator[Fold]:
    def part(name: str) -> str:
        return names.layer(layer, f"{name}.weight")

    linear = spec.activation != "swiglu_clamped"
    if not spec.is_moe(layer) or spec.experts is None:
        yield Fold("norm", layer, part("ffn_norm"), (part("mlp.gate_up"),))
        if linear:
            yield Fold("up", layer, part("mlp.gate_up"), (part("mlp.down"),))
        return
    experts = spec.experts
    shared = (part("shared_expert.gate_up"),) if experts.shared_width else ()
    plain = (part("router"), *((part("shared_expert.gate"),) if experts.shared_gate else ()))
    yield Fold("norm", layer, part("ffn_norm"), shared, plain, experts=True)
    if linear:
        yield Fold("up", layer, "", (), experts=True)
        if experts.shared_width:
            yield Fold("up", layer, part("shared_expert.gate_up"), (part("shared_expert.down"),))


def value_rows(spec: ModelSpec) -> slice:
    """Rows of attn.qkv that are values."""
    a = spec.attention
    return slice((a.heads + a.kv_heads) * a.head_dim, (a.heads + 2 * a.kv_heads) * a.head_dim)


def per_value(spec: ModelSpec, columns: Floats) -> Floats:
    """Mean over the heads that share a value head: f32 `[out's columns]` -> `[v's rows]`."""
    a = spec.attention
    if a.mla is not None:
        return columns
    mean: Floats = columns.reshape(a.kv_heads, -1, a.head_dim).mean(axis=1)
    return mean.reshape(-1)


def per_column(spec: ModelSpec, values: Floats) -> Floats:
    """Factors f32 `[v's rows]`, repeated for every head that reads them: `[out's columns]`."""
    a = spec.attention
    if a.mla is not None:
        return values
    shared = values.reshape(a.kv_heads, 1, a.head_dim)
    repeated: Floats = np.repeat(shared, a.heads // a.kv_heads, axis=1).reshape(-1)
    return repeated
