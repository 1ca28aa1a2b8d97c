"""What the config.json files of all families share: sizes, activation, windows, router checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.errors import FileFormatError
from strata.model.architectures.fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from strata.plan.spec import Activation, AttentionSpec, ExpertSpec, ModelSpec, RopeSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Sizes:
    """The numbers every decoder has."""

    layers: int
    hidden: int
    vocab: int
    context: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    tied: bool


def sizes(config: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> Sizes:
    """The common sizes; kv_heads and head_dim are the family's defaults (None: heads, hidden / heads)."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv = config.integer("num_key_value_heads", kv_heads or heads, high=MAX_HEADS)
    if heads % kv:
        raise FileFormatError(f"{config.source}: {heads} heads cannot share {kv} key-value heads evenly")
    return Sizes(
        layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden=hidden,
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        context=config.integer("max_position_embeddings", high=MAX_CONTEXT),
        eps=config.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        heads=heads,
        kv_heads=kv,
        head_dim=config.integer("head_dim", head_dim or max(hidden // heads, 1), high=MAX_HEAD_DIM),
        activation=activation(config),
        tied=config.flag("tie_word_embeddings", False),
    )


def activation(config: Fields) -> Activation:
    """hidden_act as Strata names it."""
    name = config.text("hidden_act", config.raw("activation_function") or "silu")
    if name not in ACTIVATIONS:
        raise config.unsupported(f"hidden_act {name!r}")
    return ACTIVATIONS[name]


def model(
    config: Fields, architecture: str, base: Sizes, attention: AttentionSpec, **rest: object
) -> ModelSpec:
    """The ModelSpec of the common sizes and `rest`, further fields of ModelSpec."""
    name = config.raw("_name_or_path")
    fields: dict[str, object] = {"dense_width": 0, "activation": base.activation, **rest}
    return ModelSpec(
        architecture=architecture,
        name=name[:200] if isinstance(name, str) and name else architecture,
        layers=base.layers,
        hidden=base.hidden,
        vocab=base.vocab,
        context=base.context,
        norm_eps=base.eps,
        attention=attention,
        tied_head=base.tied,
        **fields,  # type: ignore[arg-type]
    )


def grouped_query(base: Sizes, rope: RopeSpec, **rest: object) -> AttentionSpec:
    """Grouped-query attention with the usual scale; `rest` are further fields of AttentionSpec."""
    return AttentionSpec(
        heads=base.heads,
        kv_heads=base.kv_heads,
        head_dim=base.head_dim,
        rope=rope,
        **{"scale": base.head_dim**-0.5, **rest},
    )


def dense_width(config: Fields) -> int:
    """intermediate_size of the layers that do not route."""
    return config.integer("intermediate_size", high=MAX_WIDTH)


def expert_count(config: Fields, *names: str, default: int | None = None) -> int:
    """The number of routed experts under the first of its names that is present."""
    name = next((n for n in names if config.has(n)), names[0])
    if default is None:
        return config.integer(name, high=MAX_EXPERTS)
    return config.integer(name, default, high=MAX_EXPERTS)


def windows(config: Fields, layers: int, window: int, default: list[str]) -> tuple[int, ...]:
    """Sliding window per layer from layer_types (absent: `default`); () when every layer sees everything."""
    kinds = config.items("layer_types")
    kinds = default if kinds is None else kinds
    if len(kinds) != layers:
        raise FileFormatError(f"{config.source}: layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.unsupported(f"a layer of type {kind!r}")
    if not window and "sliding_attention" in kinds:
        raise FileFormatError(
            f"{config.source}: layer_types asks for sliding windows but sliding_window is not set"
        )
    sliding = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return sliding if any(sliding) else ()


def check_experts(source: str, spec: ExpertSpec) -> ExpertSpec:
    """Refuse what cannot be routed: more chosen than there are, groups that do not divide the experts.

    Returns the spec without what has no effect: the score of a single group, the epsilon of no division.
    """
    router = spec.router
    experts, groups = router.experts, router.groups
    reachable = experts // groups * router.top_groups
    if router.top_k > experts or (groups > 1 and router.top_k > reachable):
        raise FileFormatError(
            f"{source}: {router.top_k} experts per token of {min(experts, reachable)} that can be chosen"
        )
    if (
        experts % groups
        or router.top_groups > groups
        or (router.group_score == "top2" and experts // groups < 2)
    ):
        raise FileFormatError(
            f"{source}: {experts} experts cannot be chosen from {router.top_groups} of {groups} groups"
        )
    router = router if groups > 1 else replace(router, group_score="max")
    router = router if router.normalize else replace(router, normalize_eps=0.0)
    return replace(spec, router=router)
