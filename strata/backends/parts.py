"""What a decoder layer is made of, as backends get it: weights and numbers, no behaviour.

Every part reads the residual stream, normalizes it, and adds its branch to it; `scale` multiplies the branch.
A part is compared by identity, so that a backend can keep what it made of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.memory.expert_host import HostExperts
from strata.plan.spec import AttentionSpec, MlaSpec, RouterSpec
from strata.store.formats import ExpertLayout

Array = Any
Weight = Any


@dataclass(frozen=True)
class AttentionCall:
    """What one attention op needs beside its arrays. window: tokens seen, 0 = all. sinks: f32 [heads]."""

    layer: int
    heads: int
    scale: float
    window: int = 0
    sinks: Array | None = None


@dataclass(frozen=True, eq=False)
class ExpertBank:
    """The routed experts of one layer: `record(index)` is an expert's bytes, u8 [layout.record_bytes].

    Backends ask for a record when its expert is first needed and may keep it: it stays where it is. tier:
    where memory is a cache of the disk. Records come through `bring` then; `record` still works, but reads
    through the page cache, which has no room left. placed: where slices lie on the memory nodes whose threads
    compute them: for every slice u8 [layout.slice_bytes], and last what follows the slices in a record; with
    copies > 1 a record, u8 [layout.record_bytes], for every node's threads, or a single one for all.
    """

    layer: int
    count: int
    layout: ExpertLayout
    record: Callable[[int], NDArray[np.uint8]]
    tier: HostExperts | None = None
    placed: Callable[[int], tuple[NDArray[np.uint8], ...] | NDArray[np.uint8]] | None = None
    copies: int = 1

    def bring(
        self, experts: Sequence[int], *, passing: bool = False, ordered: bool = False
    ) -> AbstractContextManager[Iterator[Mapping[int, NDArray[np.uint8]]]]:
        """Records {index: bytes}, group after group as they are in memory, each valid until the next group.

        See HostExperts.bring. Without a tier there is one group, of all.
        """
        if self.tier is None:
            return nullcontext(iter([{index: self.record(index) for index in experts}]))
        return self.tier.bring(self.layer, experts, passing=passing, ordered=ordered)


@dataclass(frozen=True)
class Gating:
    """The gated activation between gate_up and down: silu(g)*u, gelu_tanh(g)*u, or gpt-oss's clamped
    `(min(g, limit) * sigmoid(alpha * g)) * (clip(u, -limit, limit) + 1)`."""

    kind: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm: f32 [hidden]."""

    weight: Array
    eps: float


@dataclass(frozen=True, eq=False)
class GroupedQueryAttention:
    """GQA with optional biases, q/k norms, clipping, sliding window and sinks.

    qkv: rows of all query heads, then of the key heads, then of the value heads.
    """

    norm: Norm
    spec: AttentionSpec
    call: AttentionCall
    qkv: Weight
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    out: Weight
    out_bias: Array | None
    scale: float


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """DeepSeek's MLA in its absorbed form: the cache holds one latent and one rotated key per token.

    k_b carries each query head into the latent's space, so that q.k is taken there; what is mixed are
    latents, and v_b expands the mixture per head. Mathematically the same as expanding every key and value.
    Queries come from q, or, where that is None, through the low rank: q_b (q_a_norm (q_a x)).
    """

    norm: Norm
    spec: AttentionSpec
    mla: MlaSpec
    call: AttentionCall
    q: Weight | None
    q_a: Weight | None
    q_a_norm: Array | None
    q_b: Weight | None
    kv_a: Weight
    kv_a_norm: Array
    k_b: Weight
    v_b: Weight
    out: Weight
    out_bias: Array | None
    scale: float


Attention = GroupedQueryAttention | LatentAttention


@dataclass(frozen=True, eq=False)
class DenseFfn:
    """A gated FFN; gate_up is interleaved (8 gate rows, 8 up rows), width its intermediate size."""

    gate_up: Weight
    down: Weight
    width: int
    gating: Gating


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The FFN of a layer that does not route."""

    norm: Norm
    ffn: DenseFfn
    scale: float


@dataclass(frozen=True, eq=False)
class Router:
    """matrix: f32 [experts, hidden]; bias joins the logits, select_bias only the choice."""

    norm: Norm
    spec: RouterSpec
    matrix: Array
    bias: Array | None
    select_bias: Array | None


@dataclass(frozen=True, eq=False)
class Experts:
    """The routed experts of a layer and, where the model has one, the shared expert beside them.

    shared_gate: f32 [1, hidden]; the shared output is multiplied by sigmoid(x . shared_gate).
    """

    bank: ExpertBank
    gating: Gating
    shared: DenseFfn | None
    shared_gate: Array | None
    scale: float


@dataclass(frozen=True, eq=False)
class RoutedFfn:
    """The FFN of a layer that routes: who is asked, and who answers."""

    router: Router
    experts: Experts


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer: its attention, then its FFN, each added to the residual stream."""

    attention: Attention
    ffn: FeedForward | RoutedFfn


@dataclass(frozen=True, eq=False)
class Model:
    """All parts of a decoder, from token ids (their embedding is times `scale`) to logits."""

    embed: Weight
    scale: float
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Weight


class StackedIds(Mapping[int, NDArray[np.int32]]):
    """Of layers, in one array i32 `[layers, rows, top_k]`; cut out for those who look, if any do."""

    def __init__(self, layers: Sequence[int], ids: NDArray[np.int32]) -> None:
        self._layers, self._ids = layers, ids

    def __getitem__(self, layer: int) -> NDArray[np.int32]:
        if layer not in self._layers:
            raise KeyError(layer)
        found: NDArray[np.int32] = self._ids[self._layers.index(layer)]
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class Routes(NamedTuple):
    """What the routers of one forward pass chose, by layer: expert ids i32 numpy [rows, top_k], and how many
    different ones they are."""

    ids: Mapping[int, NDArray[np.int32]]
    used: Mapping[int, int]


class Routing(NamedTuple):
    """What a router decided. hidden: the normalized rows that it read and the experts will read, f32
    [rows, hidden], valid until the backend's next `choose_experts`. ids i32 and weights f32 are numpy
    [rows, top_k] and stay valid."""

    hidden: Array
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
