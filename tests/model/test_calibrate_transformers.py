"""Calibration statistics, from the checkpoint as it is, against what transformers' own modules read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.engine.calibrate.run import calibrate
from strata.model.resolve import resolve
from strata.store.calibration import CalibrationStats, StatsInfo, model_fingerprint
from strata.store.checkpoint import open_checkpoint
from strata.store.unconverted import UnconvertedStore

Floats = NDArray[np.float32]

WINDOWS = [
    np.random.default_rng(seed).integers(3, 200, length).tolist() for seed, length in ((0, 40), (1, 23))
]
_INPUTS = {
    r"self_attn\.o_proj": ("attn.out.weight",),
    r"self_attn\.q_proj": ("attn.qkv.weight", "attn.q.weight"),
    r"self_attn\.q_a_proj": ("attn.q_a.weight", "attn.kv_a.weight"),
    r"self_attn\.q_b_proj": ("attn.q_b.weight",),
    r"mlp\.gate_proj": ("mlp.gate_up.weight",),
    r"mlp\.down_proj": ("mlp.down.weight",),
    r"mlp": ("experts.gate_up.pooled",),
    r"mlp\.shared_experts\.gate_proj": ("shared_expert.gate_up.weight",),
    r"mlp\.shared_experts\.down_proj": ("shared_expert.down.weight",),
}


class Observed:
    """Inputs by Strata's name of the matrix, and the routes of layers whose router returns them."""

    def __init__(self, model: Any) -> None:
        self.inputs: dict[str, list[Floats]] = {}
        self.routes: dict[int, list[NDArray[np.int64]]] = {}
        for path, module in model.named_modules():
            found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
            if path == "lm_head":
                module.register_forward_pre_hook(self._keep("head.weight"))
            for pattern, names in _INPUTS.items() if found else ():
                if found and re.fullmatch(pattern, found[2]):
                    for name in names:
                        module.register_forward_pre_hook(self._keep(f"layers.{found[1]}.{name}"))
            if found and found[2] in ("mlp.gate", "mlp.router"):
                module.register_forward_hook(self._keep_routes(int(found[1])))

    def _keep(self, name: str) -> Any:
        def hook(_: Any, arguments: tuple[Any, ...]) -> None:
            x = arguments[0].detach().numpy()
            self.inputs.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).copy())

        return hook

    def _keep_routes(self, layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            for part in output if isinstance(output, tuple) else ():
                if not part.is_floating_point():
                    self.routes.setdefault(layer, []).append(part.reshape(-1, part.shape[-1]).numpy())

        return hook


def statistics(folder: Path, moments: bool = True) -> CalibrationStats:
    source = open_checkpoint(folder / "hf")
    kind: Any = source.kind
    resolved = resolve(source.config, source.tensors, kind)
    store = UnconvertedStore(source, resolved.spec, resolved.targets, resolved.experts)
    fingerprint = model_fingerprint(resolved.spec, store.plain)
    total = sum(map(len, WINDOWS))
    info = StatsInfo(resolved.spec, fingerprint, total, 40, 0, moments, (), "test")
    calibrate(store, info, WINDOWS, folder / "stats", threads=1)
    return CalibrationStats(folder / "stats")


def observed(model: Any) -> Observed:
    found = Observed(model)
    with torch.no_grad():
        for window in WINDOWS:
            model(torch.tensor([window]), use_cache=False)
    return found


def compare(found: Any, x: Floats) -> None:
    assert found.tokens == len(x)
    size = np.abs(x)
    for value, wanted in (
        (found.absmax, size.max(axis=0)),
        (found.mean_abs, size.mean(axis=0)),
        (found.mean_square, (x * x).mean(axis=0)),
        (found.moments, x.T @ x / len(x)),
    ):
        np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("case", "least"),
    [
        ("llama-llama3", 8),
        ("granite", 8),
        ("qwen3_moe", 4),
        ("gpt_oss", 4),
        ("glm4_moe", 10),
        ("deepseek_v3", 12),
    ],
)
def test_statistics_are_of_what_the_modules_read(case: str, least: int, tmp_path: Path) -> None:
    model = small_models.save(case, tmp_path / "hf")
    stats, seen = statistics(tmp_path), observed(model)
    compared = 0
    for name, parts in seen.inputs.items():
        if stats.has(name) and name != "head.weight":
            compare(stats.linear(name), np.concatenate(parts))
            compared += 1
    assert compared >= least
    head = np.concatenate(seen.inputs["head.weight"]) * stats.info.spec.logit_scale
    compare(stats.linear("head.weight"), head)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_an_expert_reads_what_its_router_sends_it(case: str, tmp_path: Path) -> None:
    model = small_models.save(case, tmp_path / "hf")
    stats, seen = statistics(tmp_path), observed(model)
    assert set(seen.routes) == {0, 1}
    for layer, parts in seen.routes.items():
        routes, x = (
            np.concatenate(parts),
            np.concatenate(seen.inputs[f"layers.{layer}.experts.gate_up.pooled"]),
        )
        for expert in range(8):
            rows = x[(routes == expert).any(axis=1)]
            if len(rows):
                compare(stats.expert(ExpertId(layer, expert), "gate_up"), rows)
            else:
                assert stats.expert(ExpertId(layer, expert), "gate_up").tokens == 0
