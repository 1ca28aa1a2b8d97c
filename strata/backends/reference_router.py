"""Expert choice in plain torch: every variant that RouterSpec describes."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.plan.spec import RouterSpec


def route(logits: Tensor, spec: RouterSpec, select_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits `[rows, experts]` -> expert ids i64 and weights, both `[rows, top_k]`, best expert first.

    Equal scores go to the lowest index. The bias decides who is chosen and never enters a weight.
    """
    scores = _scores(logits, spec)
    choice = scores if select_bias is None else scores + select_bias
    if spec.groups > 1:
        choice = _inside_best_groups(choice, spec)
    ids = best(choice, spec.top_k)
    weights = scores.gather(1, ids)
    if spec.score == "softmax_topk":
        weights = weights.softmax(dim=1)
    elif spec.normalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + spec.normalize_eps)
    return ids, weights * spec.scale


def _scores(logits: Tensor, spec: RouterSpec) -> Tensor:
    """What experts are ranked by; "softmax_topk" ranks the logits themselves."""
    if spec.score == "softmax":
        return logits.softmax(dim=1)
    if spec.score == "sigmoid":
        return logits.sigmoid()
    return logits


def _inside_best_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """`choice` with -inf for the experts outside the `top_groups` best groups."""
    grouped = choice.view(len(choice), spec.groups, -1)
    if spec.group_score == "max":
        group_scores = grouped.amax(dim=2)
    else:
        group_scores = grouped.topk(2, dim=2).values.sum(dim=2)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed.scatter_(1, best(group_scores, spec.top_groups), True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


def best(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest scores of each row; sorted stably, for topk breaks ties as it likes."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
