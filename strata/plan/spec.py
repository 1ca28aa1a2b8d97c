"""ModelSpec: everything the decoder, the converter and the planner need to know about a model.

An architecture file (`strata/model/architectures/`) turns a config.json or GGUF metadata into a
ModelSpec; the store keeps it in its manifest; nothing downstream ever looks at config.json again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `rotary_dim` leading (or for MLA: all rope) dims of a head are rotated.

    Strata rotates halves ("neox": dim i pairs with i + rotary_dim/2) unless `interleaved` (dim 2i
    pairs with 2i+1, DeepSeek's MLA). GGUF llama-type checkpoints are un-permuted at conversion.
    attention_factor: multiplies cos and sin (YaRN's mscale; 1.0 otherwise).
    """

    type: RopeType
    theta: float
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek V2/V3): ranks and head parts in elements.

    q_lora_rank 0: queries come from one projection (`attn.q.weight`). norm_eps: of the latents' norms,
    which in DeepSeek's code does not follow rms_norm_eps.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention, or MLA when `mla` is set.

    scale multiplies q.k. qk_norm: "none", "head" (RMSNorm over each head_dim) or "full" (over the
    concatenated heads). sliding_window: tokens seen per layer, 0 = all; one entry per layer.
    sinks: one learned logit per head joins the softmax's denominator (gpt-oss).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sinks: bool = False
    clip_qkv: float | None = None
    sliding_window: tuple[int, ...] = ()
    mla: MlaSpec | None = None


@dataclass(frozen=True)
class RouterSpec:
    """How a layer's tokens choose experts. Logits are computed in f32 (weights BF16/F32).

    score: "softmax" over all experts, "sigmoid" per expert, or "softmax_topk": softmax over the k
    chosen logits only. select_bias: a correction bias is added for choosing, never for weighting.
    normalize: chosen weights are divided by their sum (+ normalize_eps). scale multiplies them at last.
    groups > 1: experts are chosen inside the `top_groups` best groups; a group's score is its maximum
    ("max", DeepSeek V2) or the sum of its two best ("top2", DeepSeek V3).
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    normalize: bool = True
    normalize_eps: float = 0.0
    scale: float = 1.0
    logit_bias: bool = False
    select_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"


@dataclass(frozen=True)
class ExpertSpec:
    """The routed experts and what stands beside them.

    width: intermediate size of a routed expert. biases: gate, up and down have biases (gpt-oss).
    shared_width: intermediate size of the always-on shared expert (0 = none); shared_gate: its output
    is multiplied by sigmoid(x . shared_expert_gate) (qwen2_moe).
    """

    router: RouterSpec
    width: int
    biases: bool = False
    shared_width: int = 0
    shared_gate: bool = False


FURTHER = "_mtp"
"""What the architecture of a layer that predicts further tokens ends in; see `ModelSpec.further`."""


@dataclass(frozen=True)
class ModelSpec:
    """One model. Sizes in elements; `moe_layers[i]` says whether layer i routes.

    dense_width: intermediate size of the layers that do not route. vocab: rows of the embedding (may
    exceed the tokenizer's vocabulary; the padding rows' logits are masked by the engine).
    embedding_scale multiplies embeddings, residual_scale every branch before it joins the residual,
    logit_scale the logits (granite). activation_alpha/limit: gpt-oss's clamped SwiGLU.
    """

    architecture: str
    name: str
    layers: int
    hidden: int
    vocab: int
    context: int
    norm_eps: float
    attention: AttentionSpec
    dense_width: int
    moe_layers: tuple[bool, ...] = ()
    experts: ExpertSpec | None = None
    activation: Activation = "silu"
    activation_alpha: float = 1.702
    activation_limit: float = 7.0
    mlp_bias: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def further(self) -> bool:
        """Whether this is no model but a layer that predicts further tokens of one (MTP head)."""
        return self.architecture.endswith(FURTHER)

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens; 0 = full attention."""
        return self.attention.sliding_window[layer] if self.attention.sliding_window else 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict for manifest.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Inverse of `to_json`; raises KeyError/TypeError on foreign data (the store wraps them)."""
        attention = dict(data["attention"])
        attention["rope"] = RopeSpec(**attention["rope"])
        attention["mla"] = MlaSpec(**attention["mla"]) if attention.get("mla") else None
        attention["sliding_window"] = tuple(attention.get("sliding_window", ()))
        experts = data.get("experts")
        if experts is not None:
            experts = ExpertSpec(**{**experts, "router": RouterSpec(**experts["router"])})
        return cls(
            **{
                **data,
                "attention": AttentionSpec(**attention),
                "experts": experts,
                "moe_layers": tuple(data.get("moe_layers", ())),
            }
        )
