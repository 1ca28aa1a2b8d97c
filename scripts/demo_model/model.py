"""The demo transformer: Qwen3-MoE (or dense Qwen3) arithmetic, float32 parameters, bf16 compute."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from demo_model.ops import Experts, FakeQuant, HeadLoss


@dataclass
class ModelConfig:
    """Sizes; ``experts`` = 0 makes a dense model whose FFN is ``inner`` wide."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    inner: int = 128
    theta: float = 10000.0
    balance: float = 2e-3  # weight of the load-balancing loss
    z_loss: float = 1e-4  # keeps router logits small

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)


DRAFT = ModelConfig(hidden=128, layers=2, heads=2, kv_heads=1, experts=0, inner=384)


def _normal(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class Block(nn.Module):
    """One layer: attention with per-head norms, then routed experts or a dense FFN."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, self.quantized, self.dtype = c, False, torch.bfloat16
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        out_std = 0.02 / math.sqrt(2 * c.layers)
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(c.head_dim)), nn.Parameter(torch.ones(c.head_dim))
        self.qkv, self.out = _normal(q + 2 * kv, c.hidden), _normal(c.hidden, q, std=out_std)
        lead = (c.experts,) if c.experts else ()
        if c.experts:
            self.router = _normal(c.experts, c.hidden)
        self.gate_up = _normal(*lead, 2 * c.inner, c.hidden)
        self.down = _normal(*lead, c.hidden, c.inner, std=out_std)

    def weight(self, parameter: Tensor) -> Tensor:
        """A matrix as it is multiplied: in compute precision, rounded to 4 bits late in training."""
        rounded: Tensor = FakeQuant.apply(parameter) if self.quantized else parameter  # type: ignore[no-untyped-call]
        return rounded.to(self.dtype)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, batch: int) -> Tensor:
        """x [B*T, hidden] -> the same; causal, grouped heads."""
        c, length = self.c, x.shape[0] // batch
        qkv = (x @ self.weight(self.qkv).t()).view(batch, length, -1, c.head_dim)
        q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], 2)
        q, k = rotate(rms(q, self.q_norm), cos, sin), rotate(rms(k, self.k_norm), cos, sin)
        repeat = c.heads // c.kv_heads
        q = q.transpose(1, 2).reshape(-1, length, c.head_dim)
        k = k.repeat_interleave(repeat, 2).transpose(1, 2).reshape(-1, length, c.head_dim)
        v = v.repeat_interleave(repeat, 2).transpose(1, 2).reshape(-1, length, c.head_dim)
        mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1).expand(len(q), length, length)
        # written out: twice as fast as scaled_dot_product_attention on CPUs at these lengths
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=c.head_dim**-0.5).softmax(-1)
        mixed = (scores @ v).view(batch, c.heads, length, c.head_dim).transpose(1, 2)
        out: Tensor = mixed.reshape(batch * length, -1) @ self.weight(self.out).t()
        return out

    def route(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, hidden] -> expert indices [N, k], gates [N, k] (sum 1), auxiliary loss."""
        c = self.c
        logits = h.float() @ self.router.t()
        p = logits.softmax(-1)
        top, index = p.topk(c.top_k, -1)
        share = torch.bincount(index.reshape(-1), minlength=c.experts).float() / index.numel()
        auxiliary = c.balance * c.experts * (share * p.mean(0)).sum()
        auxiliary = auxiliary + c.z_loss * logits.logsumexp(-1).pow(2).mean()
        return index, top / top.sum(-1, keepdim=True), auxiliary

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B*T, hidden] -> (the same, auxiliary loss, routed experts [B*T, k])."""
        x = x + self.attention(rms(x, self.attn_norm), cos, sin, batch)
        h = rms(x, self.ffn_norm)
        gate_up, down = self.weight(self.gate_up), self.weight(self.down)
        if not self.c.experts:
            gate, up = (h @ gate_up.t()).chunk(2, -1)
            return x + (F.silu(gate) * up) @ down.t(), torch.zeros(()), None
        index, gates, auxiliary = self.route(h)
        mixed: Tensor = Experts.apply(h, gate_up, down, index, gates.to(h.dtype))  # type: ignore[no-untyped-call]
        return x + mixed, auxiliary, index


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last axis, epsilon 1e-6."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split layout; x [B, T, heads, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class DemoModel(nn.Module):
    """Token embedding, blocks, final norm, tied head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, self.dtype = c, torch.bfloat16
        self.embed = _normal(c.vocab, c.hidden)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm = nn.Parameter(torch.ones(c.hidden))

    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def set_compute(self, dtype: torch.dtype) -> None:
        """bf16 for training, float32 for exact comparisons."""
        self.dtype = dtype
        for block in self.layers():
            block.dtype = dtype

    def set_quantized(self, on: bool) -> None:
        """Feel 4-bit rounding in every matrix but embedding and router."""
        for block in self.layers():
            block.quantized = on

    def hidden_states(self, ids: Tensor, routes: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> final hidden states [B*T, hidden] and the summed auxiliary loss."""
        batch, length = ids.shape
        half = torch.arange(0, self.c.head_dim, 2).float() / self.c.head_dim
        angle = torch.arange(length).float()[:, None] * self.c.theta**-half
        cos = angle.cos().to(self.dtype)[None, :, None]
        sin = angle.sin().to(self.dtype)[None, :, None]
        x, auxiliary = self.embed.to(self.dtype)[ids.reshape(-1)], torch.zeros(())
        for block in self.layers():
            x, extra, index = block(x, cos, sin, batch)
            auxiliary = auxiliary + extra
            if routes is not None and index is not None:
                routes.append(index)
        return rms(x, self.norm), auxiliary

    def forward(self, ids: Tensor, routes: list[Tensor] | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab]."""
        h, _ = self.hidden_states(ids, routes)
        return (h @ self.embed.to(self.dtype).t()).view(*ids.shape, -1)

    def loss(self, ids: Tensor, target: Tensor, teacher: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids, target [B, T]; teacher [B*T, vocab] logits -> (cross-entropy, auxiliary loss)."""
        h, auxiliary = self.hidden_states(ids)
        head = self.embed.to(self.dtype)
        entropy: Tensor = HeadLoss.apply(h, head, target.reshape(-1), teacher)  # type: ignore[no-untyped-call]
        return entropy, auxiliary
