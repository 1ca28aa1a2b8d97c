"""Muon for the matrices of attention and experts, AdamW for the rest (embedding, router, norms)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demo_model.model import DemoModel, ModelConfig

MUON_NAMES = ("qkv", "out", "gate_up", "down")


def orthogonalize(x: Tensor) -> Tensor:
    """x [n, rows, cols] -> nearest semi-orthogonal matrices (five Newton-Schulz steps in bf16)."""
    x = x.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Both optimizers behind one ``step``; the momentum is shared, AdamW's state belongs to rank 0."""

    def __init__(self, model: DemoModel, weight_decay: float = 0.1) -> None:
        self.c, self.weight_decay = model.c, weight_decay
        named = list(model.named_parameters())
        self.muon = [(n.split(".")[-1], p) for n, p in named if n.split(".")[-1] in MUON_NAMES]
        self.momentum = [torch.zeros_like(p) for _, p in self.muon]
        for momentum in self.momentum:
            momentum.share_memory_()  # type: ignore[no-untyped-call]
        chosen = {id(p) for _, p in self.muon}
        rest = [p for _, p in named if id(p) not in chosen]
        decayed, plain = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.adam.zero_grad(set_to_none=True)
        for _, p in self.muon:
            p.grad = None

    @torch.no_grad()
    def step(self, lr: float, rank: int = 0, workers: int = 1) -> None:
        """Update this worker's share: every ``workers``-th matrix, and at rank 0 all the rest."""
        if rank == 0:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
        for (name, p), momentum in list(zip(self.muon, self.momentum, strict=True))[rank::workers]:
            assert p.grad is not None
            momentum.mul_(0.95).add_(p.grad)
            update = _matrices(name, p.grad.add(momentum, alpha=0.95), self.c)
            scale = 0.2 * max(update.shape[1:]) ** 0.5  # the update's size matches AdamW's
            direction = orthogonalize(update).reshape(p.shape).float()
            p.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr * scale)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``."""
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(saved)


def _matrices(name: str, update: Tensor, c: ModelConfig) -> Tensor:
    """Stack of the matrices that are one linear map each: gate and up apart, heads in key-value groups."""
    if name == "gate_up":
        return update.reshape(-1, c.inner, c.hidden)
    if name == "qkv":
        return update.reshape(-1, c.kv_heads * c.head_dim, c.hidden)
    return update.reshape(-1, update.shape[-2], update.shape[-1])
