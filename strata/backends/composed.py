"""The decoder's ops, told in elementary ones: what each part of a layer computes.

A backend inherits these and replaces those that it can do in one go; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Backend
from strata.backends.parts import (
    Array,
    Attention,
    DenseFfn,
    Experts,
    FeedForward,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    Model,
    Norm,
    Router,
    Routes,
    Routing,
    Weight,
)
from strata.core import Batch
from strata.plan.spec import AttentionSpec


class ComposedOps(Backend):
    """See `base.Backend` for what each op does."""

    def forward(self, model: Model, batch: Batch, cache: Any) -> tuple[Routes, Array | None]:
        """Embedding, layers, logits."""
        residual = self.embedding(model.embed, batch.token_ids, model.scale)
        routes = self.run_layers(residual, model.layers, cache, batch)
        if len(batch.logit_rows) == 0:
            return routes, None
        return routes, self.logits(residual, batch.logit_rows, model.final_norm, model.head)

    def run_layers(self, residual: Array, layers: Sequence[Layer], cache: Any, batch: Batch) -> Routes:
        """Attention, then the FFN or the experts of the router's choice, layer after layer."""
        ids, used = dict[int, NDArray[np.int32]](), dict[int, int]()
        for index, layer in enumerate(layers):
            self.attend(residual, layer.attention, cache, batch)
            if isinstance(layer.ffn, FeedForward):
                self.feed_forward(residual, layer.ffn)
            else:
                routing = self.choose_experts(residual, layer.ffn.router)
                ids[index], used[index] = routing.ids, len(np.unique(routing.ids))
                self.apply_experts(residual, routing, layer.ffn.experts)
        return Routes(ids, used)

    def attend(self, residual: Array, part: Attention, cache: Any, batch: Batch) -> None:
        """Norm, attention, output projection; the branch joins the residual."""
        hidden = self._normed(residual, part.norm)
        if isinstance(part, LatentAttention):
            mixed = self._latent(hidden, part, cache, batch)
        else:
            mixed = self._grouped_query(hidden, part, cache, batch)
        self._add_linear(residual, mixed, part)

    def feed_forward(self, residual: Array, part: FeedForward) -> None:
        """Norm and FFN; the branch joins the residual."""
        self.add(residual, self._dense(self._normed(residual, part.norm), part.ffn), part.scale)

    def _add_linear(self, residual: Array, mixed: Array, part: Attention) -> None:
        """The output projection joins the residual."""
        self.add(residual, self.linear(mixed, part.out, part.out_bias), part.scale)

    def choose_experts(self, residual: Array, part: Router) -> Routing:
        """Norm, logits of all experts, the best of them."""
        hidden = self._normed(residual, part.norm)
        logits = self.plain_linear(hidden, part.matrix, part.bias)
        return Routing(hidden, *self.route(logits, part.spec, part.select_bias))

    def apply_experts(self, residual: Array, routing: Routing, part: Experts) -> None:
        """Routed experts and the shared one; their sum joins the residual."""
        self._join_experts(residual, self.experts(*routing, part.bank, part.gating), routing, part)

    def _join_experts(self, residual: Array, output: Array, routing: Routing, part: Experts) -> None:
        """residual += output of the routed experts + shared expert. Changes output."""
        if part.shared is not None:
            shared = self._dense(routing.hidden, part.shared)
            if part.shared_gate is not None:
                gate = self.plain_linear(routing.hidden, part.shared_gate)
                shared = self.scaled_by_sigmoid(shared, gate)
            self.add(output, shared)
        self.add(residual, output, part.scale)

    def logits(self, residual: Array, rows: NDArray[np.int32], norm: Norm, head: Weight) -> Array:
        """Norm and head, of the wanted rows only."""
        return self.linear(self._normed(self.take_rows(residual, rows), norm), head)

    def _normed(self, x: Array, norm: Norm) -> Array:
        return self.rms_norm(x, norm.weight, norm.eps)

    def _dense(self, hidden: Array, ffn: DenseFfn) -> Array:
        return self.ffn(hidden, ffn.gate_up, ffn.down, ffn.width, ffn.gating)

    def _grouped_query(self, hidden: Array, part: GroupedQueryAttention, cache: Any, batch: Batch) -> Array:
        """`[rows, hidden]` -> `[rows, heads * head_dim]`."""
        return self._attend_projected(self.linear(hidden, part.qkv, part.qkv_bias), part, cache, batch)

    def _attend_projected(self, qkv: Array, part: GroupedQueryAttention, cache: Any, batch: Batch) -> Array:
        """What follows the one product of queries, keys and values."""
        return self.attention(*self._heads(qkv, part, batch), cache, batch, part.call)

    def _heads(self, qkv: Array, part: GroupedQueryAttention, batch: Batch) -> tuple[Array, Array, Array]:
        """Queries, keys and values as attention takes them."""
        spec, eps, positions = part.spec, part.norm.eps, batch.positions
        q, k, v = self.split(qkv, [n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads)])
        q = self.prepare_heads(q, spec.heads, positions, spec, part.q_norm, eps)
        k = self.prepare_heads(k, spec.kv_heads, positions, spec, part.k_norm, eps)
        if spec.clip_qkv is not None:
            v = self.prepare_heads(v, spec.kv_heads, positions, _without_rotation(spec), None, eps)
        return q, k, v

    def _latent(self, hidden: Array, part: LatentAttention, cache: Any, batch: Batch) -> Array:
        """`[rows, hidden]` -> `[rows, heads * v_head_dim]`."""
        query, key = self._latent_query(hidden, part, batch), self._latent_key(hidden, part, batch)
        mixed = self.attention(query, key, None, cache, batch, part.call)
        return self.head_linear(mixed, part.v_b, part.spec.heads)

    def _latent_query(self, hidden: Array, part: LatentAttention, batch: Batch) -> Array:
        """`[rows, heads * (kv_lora_rank + qk_rope_head_dim)]`."""
        mla, heads = part.mla, part.spec.heads
        if part.q is not None:
            q = self.linear(hidden, part.q)
        else:
            low = self.rms_norm(self.linear(hidden, part.q_a), part.q_a_norm, mla.norm_eps)
            q = self.linear(low, part.q_b)
        plain, rotated = self.split_heads(q, heads, [mla.qk_nope_head_dim, mla.qk_rope_head_dim])
        rotated = self.prepare_heads(rotated, heads, batch.positions, part.spec, None, part.norm.eps)
        return self.join_heads([self.head_linear(plain, part.k_b, heads), rotated], heads)

    def _latent_key(self, hidden: Array, part: LatentAttention, batch: Batch) -> Array:
        """`[rows, kv_lora_rank + qk_rope_head_dim]`; its first kv_lora_rank elements are the value, too."""
        mla = part.mla
        both = self.linear(hidden, part.kv_a)
        latent, rotated = self.split(both, [mla.kv_lora_rank, mla.qk_rope_head_dim])
        latent = self.rms_norm(latent, part.kv_a_norm, mla.norm_eps)
        rotated = self.prepare_heads(rotated, 1, batch.positions, part.spec, None, part.norm.eps)
        return self.join_heads([latent, rotated], 1)


def _without_rotation(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, rope=replace(spec.rope, rotary_dim=0))
