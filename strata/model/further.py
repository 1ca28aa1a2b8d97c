"""The layer of a checkpoint that predicts further tokens (MTP head): what it computes of which hidden state.

Row t reads the model's hidden state h of position t and the token after it, and its logits are those of the
token after the next (DeepSeek-V3's report, arXiv:2412.19437, section 2.2, equations 21 to 23):

    x = join.embed embed_norm(embed(token t+1)) + join.hidden hidden_norm(h)     ("eh_proj")
    one decoder layer over x, with keys and values of its own; then norm and output matrix ("shared_head")

**h is the state after the model's final norm**: what vLLM (deepseek_mtp.py, glm4_moe_mtp.py) and SGLang
(deepseek_nextn.py) hand over, whose decoders return normed states. The report does not say it; the modeling
code beside DeepSeek-R1-0528's weights with MTP layers does, as ROCm/ATOM#1764 quotes it. llama.cpp#24025
takes the state before the norm for deepseek and glm; hidden_norm hides most of the difference, whose rest are
the final norm's weights. For one more token of a draft the layer is applied again, to its own output **after
its norm** in h's place: vLLM since #45895, SGLang always (acceptance of three tokens 61.4 % before, 64.6 %
after, ROCm/ATOM#1764). vLLM puts zeros in the embedding's place at position 0; SGLang does not, nor do we.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Backend
from strata.backends.parts import Array
from strata.core import Batch
from strata.errors import ConfigError
from strata.model.decoder import load_layer
from strata.model.loading import Weights, WeightStore
from strata.plan.spec import FURTHER, ModelSpec
from strata.store import names


class Predicted(NamedTuple):
    """Of the rows whose logits were wanted: logits f32 `[n, vocab]`, valid until the backend's next `logits`,
    and their hidden states after the layer's norm, f32 `[n, hidden]`."""

    logits: Array
    hidden: Array


class FurtherLayer:
    """A store of `convert --further`, ready to compute. spec: its own, of one layer.

    Raises StoreError where a tensor's shape is not the spec's.
    """

    def __init__(self, spec: ModelSpec, store: WeightStore, backend: Backend) -> None:
        self.spec = spec
        self.backend = backend
        weights, hidden = Weights(store, backend), spec.hidden
        self.embed = weights.matrix(names.EMBED, spec.vocab, hidden)
        self.head = weights.matrix(names.HEAD, spec.vocab, hidden)
        self.embed_norm = weights.norm(names.EMBED_NORM, hidden, spec.norm_eps)
        self.hidden_norm = weights.norm(names.HIDDEN_NORM, hidden, spec.norm_eps)
        self.final_norm = weights.norm(names.FINAL_NORM, hidden, spec.norm_eps)
        self.join_embed = weights.matrix(names.JOIN_EMBED, hidden, hidden)
        self.join_hidden = weights.matrix(names.JOIN_HIDDEN, hidden, hidden)
        self.layers = (load_layer(spec, weights.layer(0), 0),)

    def forward(self, batch: Batch, hidden: NDArray[np.float32], cache: Any) -> Predicted | None:
        """Compute every row and append its keys and values to `cache` (the backend's `kv_cache`, one layer).

        batch: token_ids are the tokens *after* the rows' positions. hidden: f32 `[rows, hidden]`, the states
        at those positions. None when no row's logits are wanted.
        """
        ops, eps = self.backend, self.spec.norm_eps
        embedded = ops.embedding(self.embed, batch.token_ids, self.spec.embedding_scale)
        x = ops.linear(ops.rms_norm(embedded, self.embed_norm.weight, eps), self.join_embed)
        state = ops.rms_norm(ops.vector(hidden), self.hidden_norm.weight, eps)
        ops.add(x, ops.linear(state, self.join_hidden))
        ops.run_layers(x, self.layers, cache, batch)
        if len(batch.logit_rows) == 0:
            return None
        last = ops.rms_norm(ops.take_rows(x, batch.logit_rows), self.final_norm.weight, eps)
        return Predicted(ops.logits(x, batch.logit_rows, self.final_norm, self.head), last)


def check_further(further: ModelSpec, model: ModelSpec) -> None:
    """ConfigError when a layer that predicts further tokens is another model's, with what differs."""
    facts = (
        ("architecture", further.architecture.removesuffix(FURTHER), model.architecture),
        ("hidden size", further.hidden, model.hidden),
        ("vocabulary", further.vocab, model.vocab),
    )
    for fact, mine, its in facts:
        if mine != its:
            raise ConfigError(
                f"{further.name} predicts further tokens of another model: its {fact} is {mine}, that of "
                f"{model.name} is {its}",
                remedy="convert the layer from the model's own checkpoint (strata convert --further)",
            )
