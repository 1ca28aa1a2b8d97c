"""The decoder of every architecture: what a forward pass is, told in backend ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Backend
from strata.backends.parts import Array, Attention, FeedForward, Weight
from strata.core import Batch
from strata.errors import UnsupportedError
from strata.model.attention import load_attention
from strata.model.ffn import RoutedFfn, load_ffn
from strata.model.loading import Weights, WeightStore
from strata.plan.spec import ModelSpec
from strata.store import names

Routes = dict[int, NDArray[np.int32]]
"""Expert ids i32 `[rows, top_k]` that the routers of one forward pass chose, by layer."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: its attention, then its FFN, each added to the residual stream."""

    attention: Attention
    ffn: FeedForward | RoutedFfn


class Decoder:
    """A model with its weights' handles. Handles are made here; weights are touched when first needed.

    routes: what the routers chose in the latest forward pass. shared_bytes: weights that every forward
    pass reads, routed experts apart; expert_bytes: bytes of one expert, by layer.
    """

    def __init__(self, spec: ModelSpec, store: WeightStore, backend: Backend) -> None:
        """Raises StoreError where a tensor's shape is not the spec's, UnsupportedError for MLP biases."""
        if spec.mlp_bias:
            raise UnsupportedError(f"{spec.name}: biases in the dense MLP (mlp_bias) are not supported")
        self.spec = spec
        self.backend = backend
        weights = Weights(store, backend)
        self.embed = weights.matrix(names.EMBED, spec.vocab, spec.hidden)
        self.head = self._load_head(weights)
        # A scaled norm scales the logits: one multiplication less per token, the head being linear.
        self.final_norm = weights.norm(names.FINAL_NORM, spec.hidden, spec.norm_eps, scale=spec.logit_scale)
        self.layers = [self._load_layer(weights, index) for index in range(spec.layers)]
        self.routes: Routes = {}
        self.expert_bytes = {
            index: store.expert_layout(index).payload_bytes
            for index in range(spec.layers)
            if spec.is_moe(index)
        }
        # Of the embedding a step reads its tokens' rows only, unless it is the head as well.
        unread = 0 if spec.tied_head else weights.nbytes[names.EMBED]
        self.shared_bytes = sum(weights.nbytes.values()) - unread

    def forward(self, batch: Batch, cache: Any) -> Array | None:
        """Compute every row and append its keys and values to `cache` (the backend's `kv_cache`).

        Returns logits f32 `[len(logit_rows), vocab]`, None when no row's logits are wanted; they are valid
        until the next pass.
        """
        ops = self.backend
        self.routes = {}
        residual = ops.embedding(self.embed, batch.token_ids, self.spec.embedding_scale)
        for index, layer in enumerate(self.layers):
            ops.attend(residual, layer.attention, cache, batch)
            if isinstance(layer.ffn, FeedForward):
                ops.feed_forward(residual, layer.ffn)
            else:
                routing = ops.choose_experts(residual, layer.ffn.router)
                self.routes[index] = routing.ids
                ops.apply_experts(residual, routing, layer.ffn.experts)
        if len(batch.logit_rows) == 0:
            return None
        return ops.logits(residual, batch.logit_rows, self.final_norm, self.head)

    def _load_head(self, weights: Weights) -> Weight:
        if self.spec.tied_head:
            return self.embed
        return weights.matrix(names.HEAD, self.spec.vocab, self.spec.hidden)

    def _load_layer(self, weights: Weights, index: int) -> DecoderLayer:
        part = weights.layer(index)
        return DecoderLayer(load_attention(self.spec, part, index), load_ffn(self.spec, part, index))
