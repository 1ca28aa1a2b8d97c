"""Specs whose numbers cannot belong to a model are refused before anything is sized by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from strata.plan.check import check_spec
from strata.plan.spec import AttentionSpec, ExpertSpec, MlaSpec, ModelSpec, RopeSpec, RouterSpec

ROPE = RopeSpec("default", 1e4, 16)
MLA = MlaSpec(0, 32, 16, 8, 24)
SPEC = ModelSpec(
    architecture="qwen3_moe",
    name="tiny",
    layers=2,
    hidden=64,
    vocab=256,
    context=128,
    norm_eps=1e-6,
    attention=AttentionSpec(4, 2, 16, 0.25, ROPE, sliding_window=(0, 8)),
    dense_width=0,
    moe_layers=(True, True),
    experts=ExpertSpec(RouterSpec(8, 2, groups=4, top_groups=2), 32),
)


def changed(part: Any, path: str, value: Any) -> Any:
    """A copy of nested dataclasses in which the field at a dotted path has another value."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(part, **{name: changed(getattr(part, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers", 0, "layers is 0"),
        ("layers", 10**9, "layers is 1000000000"),
        ("layers", 3, "moe_layers has 2 entries for 3 layers"),
        ("hidden", -64, "hidden is -64"),
        ("vocab", 10**12, "vocab is 1000000000000"),
        ("context", 10**30, "context is 10+, expected 1 to"),
        ("norm_eps", float("nan"), "norm_eps is nan"),
        ("dense_width", -1, "dense_width is -1"),
        ("experts", None, "experts is null"),
        ("attention.heads", 0, "attention.heads is 0"),
        ("attention.heads", 5, "attention.heads is 5, no multiple of kv_heads, which is 2"),
        ("attention.kv_heads", 0, "attention.kv_heads is 0"),
        ("attention.scale", float("inf"), "attention.scale is inf"),
        ("attention.sliding_window", (4,), "sliding_window has 1 entries for 2 layers"),
        ("attention.sliding_window", (4, -1), "sliding_window is -1"),
        ("attention.mla", dataclasses.replace(MLA, v_head_dim=0), "v_head_dim is 0"),
        ("attention.mla", MLA, "rotary_dim is 16, expected 0 to 8"),
        ("attention.rope.rotary_dim", 10**9, "rotary_dim is 1000000000, expected 0 to 16"),
        ("attention.rope.rotary_dim", 15, "rotary_dim is 15, expected an even number"),
        ("attention.rope.theta", 0.0, "theta is 0.0"),
        ("attention.rope.factor", -1.0, "factor is -1.0"),
        ("attention.rope.factor", float("nan"), "attention.rope.factor is nan"),
        ("attention.rope.type", "yarn", "original_context is 0, expected 1 to"),
        ("attention.rope", RopeSpec("yarn", 1.0, 16, original_context=8), "theta 1.0"),
        ("attention.rope", RopeSpec("yarn", 1e4, 16, original_context=8, beta_slow=0.0), "beta_slow 0.0"),
        ("attention.rope", RopeSpec("llama3", 1e4, 16, original_context=8, low_freq_factor=4.0), "is 4.0"),
        ("experts.width", 0, "experts.width is 0"),
        ("experts.router.top_k", 0, "top_k is 0"),
        ("experts.router.top_k", 5, "top_k is 5, expected 1 to 4"),
        ("experts.router.groups", 0, "groups is 0"),
        ("experts.router.groups", 3, "8 experts cannot be in 3 groups"),
        ("experts.router.top_groups", 5, "top_groups is 5, expected 1 to 4"),
        ("experts.router.scale", float("-inf"), "experts.router.scale is -inf"),
    ],
)
def test_numbers_that_cannot_be_are_refused(path: str, value: Any, message: str) -> None:
    check_spec(SPEC)
    with pytest.raises(ValueError, match=message):
        check_spec(changed(SPEC, path, value))
