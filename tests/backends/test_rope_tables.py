"""RoPE tables against transformers' own, for every type that RopeSpec knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.backends.rope import inverse_frequencies, rope_tables
from strata.plan.spec import RopeSpec

torch = pytest.importorskip("torch")
HEAD_DIM = 128

LLAMA3 = RopeSpec(
    "llama3", 500000.0, HEAD_DIM, factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeSpec("yarn", 150000.0, HEAD_DIM, factor=32.0, original_context=4096, attention_factor=1.3465736)
SPECS = {
    "default": RopeSpec("default", 1e6, HEAD_DIM),
    "partial": RopeSpec("default", 5e6, HEAD_DIM // 2),
    "linear": RopeSpec("linear", 1e4, HEAD_DIM, factor=4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn untruncated": replace(YARN, truncate=False),
    "yarn short": replace(YARN, rotary_dim=64, beta_fast=2.0, beta_slow=1.0, theta=1e4, factor=40.0),
}


def transformers_frequencies(rope: RopeSpec) -> np.ndarray:
    """inv_freq as transformers' rotary embedding classes compute it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.type == "default":
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float) / rope.rotary_dim
        return (1.0 / (rope.theta**exponents)).numpy()
    parameters = {
        "rope_type": rope.type,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
        "attention_factor": rope.attention_factor,
        "partial_rotary_factor": rope.rotary_dim / HEAD_DIM,
    }
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.type](config, "cpu")
    assert rope.type != "yarn" or factor == rope.attention_factor
    return frequencies.numpy()


@pytest.mark.parametrize("name", SPECS)
def test_frequencies_are_transformers_to_the_last_bit_or_next_to_it(name: str) -> None:
    ours, theirs = inverse_frequencies(SPECS[name]), transformers_frequencies(SPECS[name])
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=2)
    assert (ours == theirs).mean() > 0.9


@pytest.mark.parametrize("name", SPECS)
def test_long_positions_agree(name: str) -> None:
    """At position 131071 an error of one bit in a frequency shows in the second decimal of the cosine."""
    rope = SPECS[name]
    positions = np.array([0, 1, 777, 4096, 131071], dtype=np.int32)
    cos, sin = rope_tables(rope, positions)
    angles = torch.from_numpy(positions).float()[:, None] * torch.from_numpy(transformers_frequencies(rope))
    assert cos.dtype == sin.dtype == np.float32
    close = np.abs(cos - (angles.cos() * rope.attention_factor).numpy()) < 1e-6
    close &= np.abs(sin - (angles.sin() * rope.attention_factor).numpy()) < 1e-6
    assert close.mean() > 0.98 and close[:3].mean() > 0.99
    np.testing.assert_allclose(cos, (angles.cos() * rope.attention_factor).numpy(), atol=0.02)


def test_nothing_rotates_without_rotary_dims() -> None:
    cos, sin = rope_tables(RopeSpec("default", 1e4, 0), np.arange(3, dtype=np.int32))
    assert cos.shape == sin.shape == (3, 0)


def test_frequencies_are_shared_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        inverse_frequencies(LLAMA3)[0] = 1.0
