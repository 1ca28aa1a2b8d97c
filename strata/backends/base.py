"""The ops of one processor. The decoder calls these and nothing else, so a backend is a whole machine.

`Array` is whatever the backend computes with (numpy for `cpu`, torch for `reference`): the decoder only
passes it on, slices columns with `split` and never looks inside. Activations are f32 `[rows, cols]`, rows
packed as in Batch. `Weight` is a backend's handle on a packed matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from strata.backends.parts import (
    Array,
    Attention,
    AttentionCall,
    ExpertBank,
    Experts,
    FeedForward,
    Gating,
    Layer,
    Model,
    Norm,
    Router,
    Routes,
    Routing,
    Weight,
)
from strata.core import Batch, KvDtype
from strata.plan.spec import AttentionSpec, ModelSpec, RouterSpec
from strata.store.formats import PackedTensor

Activations = Literal["int8", "int8_per_token", "f32"]
"""What the cpu backend's products read; see there."""
KvStorage = Literal["int8", "bf16", "f32"]
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)

PAGE_ALIGNMENT = 64
"""Bytes: KV pages and the parts of their layers begin at multiples of it."""
_ELEMENT_BYTES: dict[KvStorage, int] = {"int8": 1, "bf16": 2, "f32": 4}
_SCALE_BYTES = 4
_LANE_BYTES = 4
_VALUE_LANES = 16


def group_of(dtype: KvDtype) -> int:
    """Elements of a head that share a scale; 0: all of them, or there are no scales."""
    return int(dtype.removeprefix("int8g")) if dtype.startswith("int8g") else 0


@dataclass(frozen=True)
class KvSpec:
    """Geometry of the KV cache of one model.

    Keys are `[kv_heads, key_dim]` and values `[kv_heads, value_dim]` per token and layer. With
    `value_in_key` (MLA) only keys are stored and the value is a key's first value_dim elements.
    int8: one f32 scale per token, head and `group` of elements for keys, others for values. A page is one
    block of bytes on every tier: layer after layer, so that one copy moves a page and a layer of a page is
    one range. steps: of int8t, each layer's scale of keys and of values; what exceeds 127 of them is clipped.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page_tokens: int
    dtype: KvDtype
    value_in_key: bool = False
    steps: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        wanted = self.layers if self.dtype == "int8t" else 0
        if len(self.steps) != wanted:
            raise ValueError(f"kv cache: scales of {len(self.steps)} layers, {self.dtype} takes {wanted}")

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        page_tokens: int,
        dtype: KvDtype,
        steps: tuple[tuple[float, float], ...] = (),
    ) -> KvSpec:
        """The cache that a model needs."""
        attention, mla = spec.attention, spec.attention.mla
        if mla is None:
            heads, dim = attention.kv_heads, attention.head_dim
            return cls(spec.layers, heads, dim, dim, page_tokens, dtype, False, steps)
        key = mla.kv_lora_rank + mla.qk_rope_head_dim
        return cls(spec.layers, 1, key, mla.kv_lora_rank, page_tokens, dtype, True, steps)

    @property
    def storage(self) -> KvStorage:
        """What an element is stored as."""
        return self.dtype if self.dtype in ("bf16", "f32") else "int8"

    @property
    def group(self) -> int:
        """Elements of a head that share a scale; 0: all of them."""
        return group_of(self.dtype)

    def scales(self, dim: int) -> int:
        """Scales that a page holds of one key or value of `dim` elements."""
        if self.dtype == "int8t" or self.storage != "int8":
            return 0
        return -(-dim // self.group) if self.group else 1

    @cached_property  # it is asked for after every step
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page: keys, values, int8's scales of both, with all their padding.

        The layout is csrc/cpu/kv_cache.h's, which refuses a cache of another size.
        """
        element = _ELEMENT_BYTES[self.storage]
        parts = [_padded(self.key_dim * element, _LANE_BYTES), _SCALE_BYTES * self.scales(self.key_dim)]
        if not self.value_in_key:
            parts.append(_padded(self.value_dim, _VALUE_LANES) * element)
            parts.append(_SCALE_BYTES * self.scales(self.value_dim))
        return sum(_padded(self.page_tokens * self.kv_heads * part, PAGE_ALIGNMENT) for part in parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all its layers, one after the other."""
        return self.layers * self.layer_bytes


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class BestLogits(NamedTuple):
    """values f32 and ids i32, both `[rows, count]`, in host memory."""

    values: NDArray[np.float32]
    ids: NDArray[np.int32]


class Drawing(NamedTuple):
    """How a request's sampler chooses among the best logits: top_k of them, those that reach top_p, those of
    at least min_p, by 1 / temperature (0: the best one), with a number in [0, 1) for each of its next tokens.

    log_min_p: NO_MIN_P for none. inverse_temperature else 1e-6 to 1e6.
    """

    inverse_temperature: float
    top_p: float
    log_min_p: float
    top_k: int
    numbers: Sequence[float]


NO_MIN_P = -3e38
"""ln min_p where there is none."""


class DraftRows(NamedTuple):
    """A request's rows of logits, from `first` on: of its last token, then of each token of its draft."""

    first: int
    draft: Sequence[int]
    drawing: Drawing


class Verified(NamedTuple):
    """How many tokens of a draft were drawn, and the token behind them; -1: undecided, ask the sampler."""

    accepted: int
    token: int


class Backend(Protocol):
    """Every method is one op; shapes are checked at this border and errors name op and numbers."""

    name: str
    most_best: int = 0
    """Logits of a row that `best_logits` and `verify_drafts` choose from at most; 0: read all of them."""
    draws: bool = False
    """Whether `verify_drafts` ever decides."""

    def supports(self, op: str, fmt: str) -> bool:
        """Whether `op` (a method name) works with weight format (or KV dtype) `fmt`."""
        ...

    def weight(self, tensor: PackedTensor) -> Weight:
        """A handle on a packed matrix; may keep a view of `tensor.data`."""
        ...

    def vector(self, values: NDArray[Any]) -> Array:
        """A plain vector or matrix (norm, bias, router) as f32."""
        ...

    def kv_cache(self, spec: KvSpec, pages: int) -> Any:
        """Storage for `pages` KV pages; memory.kv_pages decides which request owns which."""
        ...

    def copy_pages(self, cache: Any, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, in all layers: (source, target) after (source, target)."""
        ...

    # A forward pass and what it is made of. `composed.ComposedOps` tells each in the ops below it.

    def forward(self, model: Model, batch: Batch, cache: Any) -> tuple[Routes, Array | None]:
        """A whole pass: `embedding`, `run_layers` and, unless no row's are wanted, `logits`."""
        ...

    def embedding(self, weight: Weight, token_ids: NDArray[np.int32], scale: float) -> Array:
        """Rows of a packed matrix: f32 [rows, hidden] * scale."""
        ...

    def run_layers(self, residual: Array, layers: Sequence[Layer], cache: Any, batch: Batch) -> Routes:
        """residual through all layers, in place."""
        ...

    def attend(self, residual: Array, part: Attention, cache: Any, batch: Batch) -> None:
        """residual += attention, in place; the new tokens' keys and values are in the cache afterwards."""
        ...

    def feed_forward(self, residual: Array, part: FeedForward) -> None:
        """residual += FFN, in place."""
        ...

    def choose_experts(self, residual: Array, part: Router) -> Routing:
        """The experts of every row, by the normalized residual."""
        ...

    def apply_experts(self, residual: Array, routing: Routing, part: Experts) -> None:
        """residual += routed experts + shared expert, in place."""
        ...

    def logits(self, residual: Array, rows: NDArray[np.int32], norm: Norm, head: Weight) -> Array:
        """Logits f32 [len(rows), vocab] of some rows; valid until the backend's next `logits`."""
        ...

    def best_logits(self, logits: Array, count: int, columns: int) -> BestLogits | None:
        """The `count` best of the first `columns` of each row, best first, the lowest id first among equals;
        None where a row has NaN or fewer. count: `most_best` at most."""
        return None

    def verify_drafts(
        self, logits: Array, drafts: Sequence[DraftRows], count: int, columns: int
    ) -> list[Verified]:
        """What each request's sampler draws from the `count` best of the first `columns`, and never another
        token; undecided where it is not certain."""
        return [Verified(0, -1)] * len(drafts)

    def some_rows(self, x: Array, first: int, count: int) -> Array:
        """Rows [first, first + count) of x: a view."""
        return x[first : first + count]

    # Elementary ops.

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last len(weight) elements of each group of them."""
        ...

    def add(self, residual: Array, branch: Array, scale: float = 1.0) -> None:
        """residual += scale * branch, in place."""
        ...

    def scaled_by_sigmoid(self, x: Array, gate: Array) -> Array:
        """x [rows, cols] * sigmoid(gate [rows, 1])."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """f32 [rows, cols] -> [rows, weight rows]."""
        ...

    def plain_linear(self, x: Array, matrix: Array, bias: Array | None = None) -> Array:
        """The same with an unpacked f32 matrix (router, shared-expert gate), accumulated in f32."""
        ...

    def head_linear(self, x: Array, weight: Weight, heads: int) -> Array:
        """Rows [h*n, (h+1)*n) of `weight` times x[:, h] for each head h (MLA).

        [rows, heads*in] -> [rows, heads*n].
        """
        ...

    def take_rows(self, x: Array, rows: NDArray[np.int32]) -> Array:
        """Rows `rows` of x, in that order: [n, cols] (the rows whose logits are wanted)."""
        ...

    def split(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        """Column slices of x, contiguous or views."""
        ...

    def join_heads(self, parts: Sequence[Array], heads: int) -> Array:
        """Concatenate [rows, heads*d_i] along each head's elements -> [rows, heads*sum(d_i)]."""
        ...

    def split_heads(self, x: Array, heads: int, sizes: Sequence[int]) -> list[Array]:
        """Inverse of join_heads."""
        ...

    def prepare_heads(
        self,
        x: Array,
        heads: int,
        positions: NDArray[np.int32],
        spec: AttentionSpec,
        norm: Array | None,
        eps: float,
    ) -> Array:
        """RMSNorm by `norm` ("head": per head, "full": over all), clip to +-clip_qkv, RoPE (OLMoE's order).

        x is [rows, heads*dim] and may be changed in place; norm None = no norm; rotary_dim 0 = no rotation
        (values, which are only clipped). Only the first rotary_dim elements of each head turn.
        """
        ...

    def attention(
        self, q: Array, k: Array, v: Array | None, cache: Any, batch: Batch, call: AttentionCall
    ) -> Array:
        """Append k and v to the pages, then causal attention.

        [rows, heads*key_dim] -> [rows, heads*value_dim].
        v is None with value_in_key. Query head h reads KV head h // (heads / kv_heads).
        """
        ...

    def route(self, logits: Array, spec: RouterSpec, select_bias: Array | None) -> tuple[Any, Any]:
        """f32 [rows, experts] -> expert ids i32 [rows, top_k] and weights f32 [rows, top_k] (numpy)."""
        ...

    def ffn(self, x: Array, gate_up: Weight, down: Weight, width: int, gating: Gating) -> Array:
        """Dense gated FFN; gate_up is interleaved (8 gate rows, 8 up rows)."""
        ...

    def experts(
        self,
        x: Array,
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        bank: ExpertBank,
        gating: Gating,
        active: Sequence[int] | None = None,
    ) -> Array:
        """Routed experts, tokens gathered per expert; sum of weight * expert(x) in ascending expert order.

        active: the experts computed here, ascending; what is routed to others is left out. None: all.
        """
        ...

    def to_numpy(self, x: Array) -> NDArray[np.float32]:
        """For the sampler and for tests."""
        ...
