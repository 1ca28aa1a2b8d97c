"""The decoder of every architecture: what a forward pass is, told in backend ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.backends.base import Array, Backend, Weight
from strata.core import Batch
from strata.errors import UnsupportedError
from strata.model.attention import Attention, load_attention
from strata.model.ffn import Ffn, Routes, load_ffn
from strata.model.loading import Weights, WeightStore
from strata.plan.spec import ModelSpec
from strata.store import names


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: normalized residual -> attention -> residual -> normalized -> FFN -> residual."""

    attention_norm: Array
    attention: Attention
    ffn_norm: Array
    ffn: Ffn


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
        self.final_norm = weights.vector(names.FINAL_NORM, spec.hidden, scale=spec.logit_scale)
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

        Returns logits f32 `[len(logit_rows), vocab]`, None when no row's logits are wanted.
        """
        ops, spec = self.backend, self.spec
        residual = ops.embedding(self.embed, batch.token_ids, spec.embedding_scale)
        hidden = ops.rms_norm(residual, self.layers[0].attention_norm, spec.norm_eps)
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.final_norm]
        self.routes = {}
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            branch = layer.attention.forward(hidden, cache, batch)
            hidden = ops.add_rms_norm(residual, branch, spec.residual_scale, layer.ffn_norm, spec.norm_eps)
            branch = layer.ffn.forward(hidden, self.routes)
            hidden = ops.add_rms_norm(residual, branch, spec.residual_scale, next_norm, spec.norm_eps)
        if len(batch.logit_rows) == 0:
            return None
        return ops.linear(ops.take_rows(hidden, batch.logit_rows), self.head)

    def _load_head(self, weights: Weights) -> Weight:
        if self.spec.tied_head:
            return self.embed
        return weights.matrix(names.HEAD, self.spec.vocab, self.spec.hidden)

    def _load_layer(self, weights: Weights, index: int) -> DecoderLayer:
        spec, part = self.spec, weights.layer(index)
        return DecoderLayer(
            attention_norm=part.vector("attn_norm.weight", spec.hidden),
            attention=load_attention(spec, part, index),
            ffn_norm=part.vector("ffn_norm.weight", spec.hidden),
            ffn=load_ffn(spec, part, index),
        )
