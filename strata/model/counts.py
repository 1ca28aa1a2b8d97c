"""Parameter counts of a ModelSpec, equal to those of transformers' classes.

Buffers are not parameters: the routers' correction bias (`select_bias`) is left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.plan.spec import ModelSpec


@dataclass(frozen=True)
class Counts:
    """Parameters per part over all layers. total: everything. head: 0 when tied to the embedding.

    join: of a layer that predicts further tokens, the matrix that joins hidden state and embedding.
    routed_experts = moe_layers * experts * per_expert. active: what one token passes through (the whole
    embedding counted, as published "active" figures do).
    """

    embeddings: int
    head: int
    attention: int
    norms: int
    dense: int
    routers: int
    shared_experts: int
    routed_experts: int
    per_expert: int
    moe_layers: int
    experts: int
    top_k: int
    join: int = 0

    @property
    def total(self) -> int:
        """Everything."""
        return self.shared + self.routed_experts

    @property
    def shared(self) -> int:
        """Everything but the routed experts."""
        parts = (self.embeddings, self.head, self.attention, self.norms, self.join)
        return sum(parts) + self.dense + self.routers + self.shared_experts

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        return self.shared + self.moe_layers * self.top_k * self.per_expert


def count(spec: ModelSpec) -> Counts:
    """Counts of a model."""
    moe_layers = sum(spec.moe_layers)
    per_expert = expert_parameters(spec)
    experts = spec.experts.router.experts if spec.experts else 0
    embedding = spec.vocab * spec.hidden
    return Counts(
        embeddings=embedding,
        head=0 if spec.tied_head else embedding,
        attention=spec.layers * attention_parameters(spec),
        norms=(2 * spec.layers + (3 if spec.further else 1)) * spec.hidden,
        dense=(spec.layers - moe_layers) * 3 * spec.hidden * spec.dense_width,
        routers=moe_layers * router_parameters(spec),
        shared_experts=moe_layers * shared_parameters(spec),
        routed_experts=moe_layers * experts * per_expert,
        per_expert=per_expert,
        moe_layers=moe_layers,
        experts=experts,
        top_k=spec.experts.router.top_k if spec.experts else 0,
        join=2 * spec.hidden * spec.hidden if spec.further else 0,
    )


def expert_parameters(spec: ModelSpec) -> int:
    """Parameters of one routed expert; 0 for dense models."""
    if spec.experts is None:
        return 0
    width = spec.experts.width
    biases = 2 * width + spec.hidden if spec.experts.biases else 0
    return 3 * spec.hidden * width + biases


def router_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer's router."""
    if spec.experts is None:
        return 0
    router = spec.experts.router
    return router.experts * (spec.hidden + (1 if router.logit_bias else 0))


def shared_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer's shared expert with its gate."""
    if spec.experts is None:
        return 0
    gate = spec.hidden if spec.experts.shared_gate else 0
    return 3 * spec.hidden * spec.experts.shared_width + gate


def attention_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer's attention, its q/k norms, biases and sinks included."""
    a, hidden = spec.attention, spec.hidden
    if a.mla is not None:
        return latent_parameters(spec)
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    norm = {"none": 0, "head": 2 * a.head_dim, "full": q + kv}[a.qk_norm]
    biases = (q + 2 * kv if a.qkv_bias else 0) + (hidden if a.out_bias else 0)
    return hidden * (q + 2 * kv) + q * hidden + norm + biases + (a.heads if a.sinks else 0)


def latent_parameters(spec: ModelSpec) -> int:
    """The same for multi-head latent attention, norms of the latents included."""
    a, mla, hidden = spec.attention, spec.attention.mla, spec.hidden
    assert mla is not None
    queries = a.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    q = queries * hidden
    if mla.q_lora_rank:
        q = mla.q_lora_rank * (hidden + 1 + queries)
    kv_a = (mla.kv_lora_rank + mla.qk_rope_head_dim) * hidden + mla.kv_lora_rank
    kv_b = mla.kv_lora_rank * a.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + kv_a + kv_b + a.heads * mla.v_head_dim * hidden
