"""The decoder of every architecture: what a forward pass is, told in backend ops."""

from __future__ import annotations

from collections import Counter
from typing import Any

from strata.backends.base import Backend
from strata.backends.parts import Array, Layer, Model, Routes, Weight
from strata.core import Batch
from strata.errors import UnsupportedError
from strata.memory.expert_host import HostExperts
from strata.memory.node_copies import NodeCopies
from strata.memory.node_experts import NodeExperts
from strata.model.attention import load_attention
from strata.model.ffn import load_ffn
from strata.model.loading import Weights, WeightStore
from strata.plan.spec import ModelSpec
from strata.store import names


class Decoder:
    """A model with its weights' handles. Handles are made here; weights are touched when first needed.

    routes: what the routers chose in the latest forward pass. windows: how many layers see a window of so
    many tokens (0: all). shared_bytes: weights that every forward pass reads, routed experts apart;
    expert_bytes: bytes of one expert, by layer. keeps_hidden: whether a pass leaves `hidden`, the state of
    every row after the final norm, f32 `[rows, hidden]`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        store: WeightStore,
        backend: Backend,
        tier: HostExperts | None = None,
        placed: NodeExperts | NodeCopies | None = None,
    ) -> None:
        """tier: what brings experts of a model that is larger than memory. placed: see Weights.

        Raises StoreError where a tensor's shape is not the spec's, UnsupportedError for MLP biases.
        """
        if spec.mlp_bias:
            raise UnsupportedError(
                f"{spec.name}: biases in the dense MLP (mlp_bias) are not supported",
                remedy="choose another model",
            )
        self.spec = spec
        self.backend = backend
        self.tier = tier
        weights = Weights(store, backend, tier, placed)
        self.embed = weights.matrix(names.EMBED, spec.vocab, spec.hidden)
        self.head = self._load_head(weights)
        # A scaled norm scales the logits: one multiplication less per token, the head being linear.
        self.final_norm = weights.norm(names.FINAL_NORM, spec.hidden, spec.norm_eps, scale=spec.logit_scale)
        self.layers = tuple(load_layer(spec, weights.layer(index), index) for index in range(spec.layers))
        self.parts = Model(self.embed, spec.embedding_scale, self.layers, self.final_norm, self.head)
        self.routes = Routes({}, {})
        self.keeps_hidden = False
        self.hidden: Array | None = None
        self.expert_bytes = {
            index: store.expert_layout(index).payload_bytes
            for index in range(spec.layers)
            if spec.is_moe(index)
        }
        self.windows = Counter(spec.window(index) for index in range(spec.layers))
        # Of the embedding a step reads its tokens' rows only, unless it is the head as well.
        unread = 0 if spec.tied_head else weights.nbytes[names.EMBED]
        self.shared_bytes = sum(weights.nbytes.values()) - unread

    def forward(self, batch: Batch, cache: Any) -> Array | None:
        """Compute every row and append its keys and values to `cache` (the backend's `kv_cache`).

        Returns logits f32 `[len(logit_rows), vocab]`, None when no row's logits are wanted; they are valid
        until the next pass.
        """
        ops, model = self.backend, self.parts
        if not self.keeps_hidden:
            self.routes, logits = ops.forward(model, batch, cache)
            return logits
        residual = ops.embedding(self.embed, batch.token_ids, model.scale)
        self.routes = ops.run_layers(residual, self.layers, cache, batch)
        self.hidden = ops.rms_norm(residual, self.final_norm.weight, self.final_norm.eps)
        if len(batch.logit_rows) == 0:
            return None
        return ops.logits(residual, batch.logit_rows, self.final_norm, self.head)

    def _load_head(self, weights: Weights) -> Weight:
        if self.spec.tied_head:
            return self.embed
        return weights.matrix(names.HEAD, self.spec.vocab, self.spec.hidden)


def load_layer(spec: ModelSpec, weights: Weights, index: int) -> Layer:
    """Decoder layer `index`; weights: its own, see `Weights.layer`."""
    return Layer(load_attention(spec, weights, index), load_ffn(spec, weights, index))
