"""RoPE and attention scale of real config.json files against transformers' classes for them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_counts import KIMI_K2, SUPPORTED, load
from transformers import AutoConfig

from strata.backends.rope import inverse_frequencies
from strata.model.resolve import resolve


def class_of(module: ModuleType, suffix: str) -> Any:
    return next(getattr(module, name) for name in dir(module) if name.endswith(suffix) and name != suffix)


@pytest.mark.parametrize("name", sorted(SUPPORTED | {KIMI_K2}))
def test_rope_equals_transformers(name: str, cases: Path) -> None:
    config = load(name)
    spec = resolve(config, None, "safetensors").spec
    model_type = "deepseek_v3" if name == KIMI_K2 else config["model_type"]
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config", "auto_map")}
    theirs = AutoConfig.for_model(model_type, **fields)
    rotary = class_of(module, "RotaryEmbedding")(theirs)
    with torch.device("meta"):
        attention = class_of(module, "Attention")(theirs, 0)
    expected = rotary.inv_freq.numpy()
    ours = inverse_frequencies(spec.attention.rope)
    assert ours.shape == expected.shape
    assert np.abs(ours / expected - 1).max() < 1e-6
    assert spec.attention.rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert spec.attention.scale == pytest.approx(attention.scaling, rel=1e-12)


def test_old_and_new_spelling_are_the_same_rope(cases: Path) -> None:
    """config.json of transformers 4 (rope_theta and rope_scaling) and of 5 (rope_parameters)."""
    old = load("real/meta-llama--Meta-Llama-3.1-8B_config.json")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert resolve(new, None, "safetensors") == resolve(old, None, "safetensors")
