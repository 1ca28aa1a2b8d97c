"""A model in numbers: what the cost model, the planner and the simulator know of it, and nothing else.

`strata/model/footprint.py` fills one in from a store, a checkpoint's headers or a bare config.json; a test
may write one by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core import KvDtype


@dataclass(frozen=True)
class Attention:
    """Attention's work that grows with the context, over all layers.

    windows: tokens that each layer looks back on, 0 = all; one entry per layer. macs: multiply-adds per token
    and token of context in one layer (scores and sums of all heads). new_bytes: KV of one token in one layer.
    """

    windows: tuple[int, ...]
    macs: int
    new_bytes: int

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return len(self.windows) * self.new_bytes

    def seen(self, depth: float) -> float:
        """Tokens of context that a token at `depth` meets, summed over the layers."""
        return sum(min(depth, window) if window else depth for window in self.windows)


@dataclass(frozen=True)
class Footprint:
    """One model in its formats. Bytes are those of packed tensors; multiply-adds are per token.

    static: everything but embedding, head and routed experts, read in every step; head: the output matrix,
    read when logits are wanted; embedding: rows are looked up, so it need not be on the device (unless it is
    the head: tied). moe_layers of `layers` route, each to `top_k` of its `experts`.
    expert_bytes: one expert's record, the largest should layers differ: a slot takes any. expert_total: of
    all experts' records. slices: parts an expert is cut into, so that each memory node can hold its own.
    page_tokens: of a KV page over all layers. activation_bytes: of one token in the widest layer, f32;
    scratch_bytes: beside them, however many tokens there are. further: no model, but a layer of one that
    predicts further tokens.
    """

    name: str
    layers: int
    moe_layers: int
    hidden: int
    vocab: int
    context: int
    static: int
    static_macs: int
    head: int
    head_macs: int
    embedding: int
    tied: bool
    experts: int
    top_k: int
    expert_bytes: int
    expert_macs: int
    expert_total: int
    slices: int
    attention: Attention
    kv_dtype: KvDtype
    page_tokens: int
    activation_bytes: int
    scratch_bytes: int = 0
    notes: tuple[str, ...] = ()
    further: bool = False

    @property
    def page_bytes(self) -> int:
        """One KV page over all layers."""
        return self.page_tokens * self.attention.token_bytes

    @property
    def expert_count(self) -> int:
        """Routed experts of the whole model."""
        return self.moe_layers * self.experts

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.static + self.expert_total + self.embedding + (0 if self.tied else self.head)

    def pages(self, tokens: int, requests: int) -> int:
        """Pages that `requests` requests of `tokens` tokens fill."""
        return requests * -(-tokens // self.page_tokens)

    def kv_ceiling(self, tokens: int, requests: int) -> int:
        """The most KV there can be, in bytes: whole pages, every request as long as the context allows.

        2 x layers x KV heads x head size x bytes x tokens x requests, and the scales (field report B); MLA
        keeps one latent instead of keys and values.
        """
        return self.pages(tokens, requests) * self.page_bytes
