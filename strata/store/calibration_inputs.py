"""The vectors that a model's matrices read, by name: what statistics are kept of, and who reads which.

Values are mixed by attention before anything else reads them, and mixing is linear: what their errors cost
is decided by the mixtures of x (`values_input`), in which the first token may weigh more than all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from strata.plan.spec import ModelSpec
from strata.store import names

ExpertPart = Literal["gate_up", "down"]
EXPERT_PARTS: tuple[ExpertPart, ExpertPart] = ("gate_up", "down")


@dataclass(frozen=True)
class LinearInput:
    """An input that statistics are kept of. also: further matrices that read the very same vectors."""

    name: str
    cols: int
    members: int = 1
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowInput:
    """Rows [start, stop) of a matrix read `member` of the input `name`."""

    start: int
    stop: int
    name: str
    member: int = 0


def linear_inputs(spec: ModelSpec) -> tuple[LinearInput, ...]:
    """Every input of a packed matrix of the model, in the order of the layers; the head's last.

    Names are those of `names.py`. Routed experts: `expert_input(layer, part)` with one member per expert and
    `pooled_input(layer, part)` over all of the layer: for down every row once per expert that it was sent to,
    for gate_up once, which only changes the count, because every row goes to equally many experts.
    The head's is `head.weight` in models with a tied head, too.
    """
    found = [entry for layer in range(spec.layers) for entry in layer_inputs(spec, layer)]
    return (*found, LinearInput(names.HEAD, spec.hidden))


def layer_inputs(spec: ModelSpec, layer: int) -> tuple[LinearInput, ...]:
    """Those of one decoder layer."""
    return (*_attention_inputs(spec, layer), *_ffn_inputs(spec, layer))


def expert_input(layer: int, part: ExpertPart) -> str:
    """Name of the input of the layer's routed experts; a member per expert."""
    return names.layer(layer, f"experts.{part}")


def pooled_input(layer: int, part: ExpertPart) -> str:
    """Name of the same over all experts of the layer. gate_up: what the shared expert and the router read."""
    return names.layer(layer, f"experts.{part}.pooled")


def values_input(layer: int) -> str:
    """Name of what the rows of values in attn.qkv read: for every row of a window the mixtures of x that
    attention takes for it, one for each value head, by the heads that share it in turn."""
    return names.layer(layer, "attn.v")


def row_inputs(spec: ModelSpec, matrix: str, rows: int) -> tuple[RowInput, ...]:
    """Which input each run of rows of a matrix of the shared file reads, in the order of its `rows`."""
    layer, part = names.place(matrix)
    a = spec.attention
    if part == "attn.qkv" and layer is not None:
        first = rows - a.kv_heads * a.head_dim
        return RowInput(0, first, matrix), RowInput(first, rows, values_input(layer))
    if part in ("attn.k_b", "attn.v_b"):
        size = rows // a.heads
        return tuple(RowInput(h * size, (h + 1) * size, matrix, h) for h in range(a.heads))
    return (RowInput(0, rows, matrix),)


def _attention_inputs(spec: ModelSpec, layer: int) -> Iterator[LinearInput]:
    a, mla = spec.attention, spec.attention.mla

    def part(name: str, cols: int, heads: int = 1, also: str = "") -> LinearInput:
        others = (names.layer(layer, also),) if also else ()
        return LinearInput(names.layer(layer, name), cols, heads, others)

    if mla is None:
        yield part("attn.qkv.weight", spec.hidden)
        yield LinearInput(values_input(layer), spec.hidden)
        yield part("attn.out.weight", a.heads * a.head_dim)
        return
    first = "attn.q_a.weight" if mla.q_lora_rank else "attn.q.weight"
    yield part(first, spec.hidden, also="attn.kv_a.weight")
    if mla.q_lora_rank:
        yield part("attn.q_b.weight", mla.q_lora_rank)
    yield part("attn.k_b.weight", mla.qk_nope_head_dim, a.heads)
    yield part("attn.v_b.weight", mla.kv_lora_rank, a.heads)
    yield part("attn.out.weight", a.heads * mla.v_head_dim)


def _ffn_inputs(spec: ModelSpec, layer: int) -> Iterator[LinearInput]:
    if not spec.is_moe(layer) or spec.experts is None:
        yield LinearInput(names.layer(layer, "mlp.gate_up.weight"), spec.hidden)
        yield LinearInput(names.layer(layer, "mlp.down.weight"), spec.dense_width)
        return
    experts, count = spec.experts, spec.experts.router.experts
    shared = (names.layer(layer, "shared_expert.gate_up.weight"),) if experts.shared_width else ()
    yield LinearInput(pooled_input(layer, "gate_up"), spec.hidden, also=shared)
    yield LinearInput(pooled_input(layer, "down"), experts.width)
    yield LinearInput(expert_input(layer, "gate_up"), spec.hidden, count)
    yield LinearInput(expert_input(layer, "down"), experts.width, count)
    if experts.shared_width:
        yield LinearInput(names.layer(layer, "shared_expert.down.weight"), experts.shared_width)
