"""Routers against transformers' own classes, family by family (case-43: details of routing per family)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from strata.backends.base import Backend
from strata.backends.cpu import CpuBackend
from strata.backends.reference import ReferenceBackend
from strata.errors import FileFormatError
from strata.model.resolve import resolve
from strata.plan.spec import RouterSpec

HIDDEN, ROWS = 32, 40
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
# model_type, its class in transformers, the name of its number of experts, further fields of config.json.
FAMILIES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("mixtral", MixtralTopKRouter, "num_local_experts", {}),
    ("qwen2_moe", Qwen2MoeTopKRouter, "num_experts", {"norm_topk_prob": False}),
    ("qwen2_moe", Qwen2MoeTopKRouter, "num_experts", {"norm_topk_prob": True}),
    ("qwen3_moe", Qwen3MoeTopKRouter, "num_experts", {"norm_topk_prob": True}),
    ("qwen3_moe", Qwen3MoeTopKRouter, "num_experts", {"norm_topk_prob": False}),
    ("olmoe", OlmoeTopKRouter, "num_experts", {"norm_topk_prob": False}),
    ("olmoe", OlmoeTopKRouter, "num_experts", {"norm_topk_prob": True}),
    ("granitemoe", GraniteMoeTopKRouter, "num_local_experts", {}),
    ("gpt_oss", GptOssTopKRouter, "num_local_experts", {}),
    ("minimax_m2", MiniMaxM2TopKRouter, "num_local_experts", {}),
    ("glm4_moe", Glm4MoeTopkRouter, "n_routed_experts", {"routed_scaling_factor": 2.5}),
    (
        "glm4_moe",
        Glm4MoeTopkRouter,
        "n_routed_experts",
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    ),
    ("glm4_moe", Glm4MoeTopkRouter, "n_routed_experts", {**GROUPS, "routed_scaling_factor": 1.0}),
    ("deepseek_v2", DeepseekV2TopkRouter, "n_routed_experts", {"routed_scaling_factor": 16.0}),
    (
        "deepseek_v2",
        DeepseekV2TopkRouter,
        "n_routed_experts",
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0},
    ),
    ("deepseek_v3", DeepseekV3TopkRouter, "n_routed_experts", {**GROUPS, "routed_scaling_factor": 2.5}),
    ("deepseek_v3", DeepseekV3TopkRouter, "n_routed_experts", {**GROUPS, "norm_topk_prob": False}),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in fields.items())}" for name, _, _, fields in FAMILIES]
BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "cpu": CpuBackend(threads=1)}


def family(
    row: tuple[str, Any, str, dict[str, Any]], experts: int, top_k: int
) -> tuple[torch.nn.Module, RouterSpec]:
    """transformers' router with random weights, and the RouterSpec of the same config.json."""
    name, router_class, count, fields = row
    config = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        count: experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        **fields,
    }
    if not name.startswith(("glm", "deepseek")):
        config = {k: v for k, v in config.items() if "group" not in k}
    hf = AutoConfig.for_model(name, **config)
    torch.manual_seed(experts + top_k)
    router = router_class(hf)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.dim() == 1 else 0.5))
    spec = resolve(hf.to_dict(), None, "safetensors").spec
    assert spec.experts is not None
    return router, spec.experts.router


def theirs(router: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> dict[str, np.ndarray]:
    """Logits, and a dense [rows, experts] matrix of weights: the order of the chosen is of no account."""
    arguments = (x, bias) if isinstance(router, MiniMaxM2TopKRouter) else (x,)
    with torch.no_grad():
        logits, weights, ids = router(*arguments)
    return {"logits": logits.numpy(), "weights": dense(ids.numpy(), weights.numpy(), logits.shape[1])}


def dense(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    out = np.zeros((len(ids), experts))
    np.put_along_axis(out, ids.astype(np.int64), weights, axis=1)
    return out


def select_bias(router: torch.nn.Module, spec: RouterSpec) -> torch.Tensor | None:
    if not spec.select_bias:
        return None
    own = getattr(router, "e_score_correction_bias", None)
    return own if own is not None else 0.3 * torch.randn(spec.experts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top_k", [1, 4, 8])
@pytest.mark.parametrize("experts", [8, 64, 128])
@pytest.mark.parametrize("row", FAMILIES, ids=IDS)
def test_weights_equal_transformers(
    row: tuple[str, Any, str, dict[str, Any]], experts: int, top_k: int, backend: str
) -> None:
    if experts == 8 and top_k == 8 and "n_group" in row[3]:
        with pytest.raises(FileFormatError, match="8 experts per token of 4"):
            family(row, experts, top_k)  # two of four groups of two
        return
    router, spec = family(row, experts, top_k)
    ops = BACKENDS[backend]
    bias = select_bias(router, spec)
    expected = theirs(router, torch.randn(ROWS, HIDDEN), bias)
    own_bias = None if bias is None else ops.vector(bias.numpy())
    ids, weights = ops.route(ops.vector(expected["logits"]), spec, own_bias)
    assert np.abs(dense(ids, weights, experts) - expected["weights"]).max() < 1e-6 * max(1.0, spec.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", FAMILIES, ids=IDS)
def test_ties_go_to_the_lowest_index(row: tuple[str, Any, str, dict[str, Any]], backend: str) -> None:
    """With equal logits whom transformers chooses is topk's whim, but not the weights; ours is fixed."""
    router, spec = family(row, 16, 4)
    ops = BACKENDS[backend]
    bias = None if not spec.select_bias else torch.zeros(16)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            tensor.zero_()
    expected = theirs(router, torch.zeros(3, HIDDEN), bias)["weights"]
    own_bias = None if bias is None else ops.vector(bias.numpy())
    ids, weights = ops.route(ops.vector(np.zeros((3, 16))), spec, own_bias)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert np.abs(np.sort(dense(ids, weights, 16)) - np.sort(expected)).max() < 1e-6
