"""Factors that are folded away change nothing, in any architecture, wherever they go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_model import gpt_oss_spec, make_backend, mla_spec, moe_spec
from whole_model import make_stats, whole_model

from strata.engine.perplexity import predictions
from strata.model.decoder import Decoder
from strata.plan.spec import ExpertSpec, ModelSpec
from strata.store import calibrated
from strata.store.convert import convert
from strata.store.folding import folds
from strata.store.options import ConvertOptions
from strata.store.reader import Store

EXACT = {"experts": "bf16", "shared": "bf16", "head": "bf16", "embed": "bf16"}
AWQ = {"experts": "awq", "shared": "awq", "head": "awq"}


def shared_expert_spec() -> ModelSpec:
    """qwen2_moe in small: a gated shared expert, biases of q, k and v, q and k normed over all heads."""
    spec = moe_spec(3)
    assert spec.experts is not None
    experts = ExpertSpec(spec.experts.router, spec.experts.width, shared_width=24, shared_gate=True)
    return replace(spec, attention=replace(spec.attention, qkv_bias=True, qk_norm="full"), experts=experts)


SPECS = {
    "moe": moe_spec(3),
    "tied": moe_spec(2, tied_head=True, residual_scale=0.5, logit_scale=0.25),
    "gelu": moe_spec(2, activation="gelu_tanh"),
    "shared_expert": shared_expert_spec(),
    "gpt_oss": gpt_oss_spec(),
    "clipped": replace(moe_spec(2), attention=replace(moe_spec(2).attention, clip_qkv=0.5)),
    "mla": mla_spec(),
    "mla_full_queries": mla_spec(0),
}


def logits_of(store: Path) -> np.ndarray:
    opened = Store.open(store)
    decoder = Decoder(opened.spec, opened, make_backend("reference", 1, "f32"))
    found = predictions(decoder, [np.arange(17) * 7 % 50, [3, 1, 4, 1, 5]], "f32")
    return np.concatenate([part.logits for part in found])


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_models_output_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random powers of two everywhere: what BF16 holds without loss, so that only a wrong place shows."""
    model = whole_model(SPECS[name])
    stats = make_stats(tmp_path / "stats", model)
    rng, calls = np.random.default_rng(1), []

    def random_factors(kind: str, inputs: calibrated.Inputs, *rest: object) -> np.ndarray:
        calls.append(inputs.name)
        found = np.exp2(rng.integers(-3, 4, len(inputs.mean_abs))).astype(np.float32)
        if len(rest) < 3 or not callable(rest[2]):
            return found
        heads, size = model.spec.attention.heads, model.spec.attention.head_dim
        per_head = len(found) // heads  # one value for all heads that share it
        return np.tile(found[:per_head], heads) if per_head == size else found

    monkeypatch.setattr(calibrated, "best_factors", random_factors)
    monkeypatch.setattr(calibrated, "has_integers", lambda fmt: True)
    sources = model.source, model.spec, model.targets, model.experts
    convert(*sources, tmp_path / "plain", ConvertOptions(**EXACT))
    convert(*sources, tmp_path / "folded", ConvertOptions(**EXACT, methods=AWQ, threads=1), stats=stats)
    before, after = logits_of(tmp_path / "plain"), logits_of(tmp_path / "folded")
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    inner = sum(fold.experts and fold.place == "up" for fold in folds(model.spec)) * 8
    outer = sum(not (fold.experts and fold.place == "up") for fold in folds(model.spec))
    assert len(calls) == inner + outer, "every place was used"


def test_places_that_are_not_exact_are_left_alone() -> None:
    places = {name: [(fold.place, fold.maker) for fold in folds(spec)] for name, spec in SPECS.items()}
    assert not any(place == "up" for place, _ in places["gpt_oss"])
    assert not any(place == "value" for place, _ in places["clipped"])
    assert not any("kv_a_norm" in maker for _, maker in places["mla"])
    assert ("norm", "final_norm.weight") in places["moe"]
    assert ("norm", "final_norm.weight") not in places["tied"]
    assert sum(place == "value" for place, _ in places["mla"]) == 2
