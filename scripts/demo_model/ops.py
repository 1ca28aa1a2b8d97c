"""Hand-written forward and backward passes that make a small MoE trainable on CPUs (bf16 GEMMs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

PAD = 32  # rows per expert are padded to a multiple: few distinct shapes keep oneDNN's kernel cache hot
CHUNK = 256  # tokens per block of logits: small enough to stay near the caches
HARD = 0.3  # weight of the true next token when a teacher is given, the rest follows the teacher


@dataclass
class Routes:
    """Tokens sorted by expert: ``inverse`` [T*k] finds a route's row, ``token`` [N] a row's token."""

    segments: list[tuple[int, int, int]]
    inverse: Tensor
    token: Tensor
    gate: Tensor


def sort_routes(index: Tensor, gate: Tensor, experts: int) -> Routes:
    """index, gate: [T, k].  Rows of one expert are contiguous, from a multiple of PAD; padding has gate 0."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    count = torch.bincount(flat, minlength=experts)
    padded = (count + PAD - 1) // PAD * PAD
    end = padded.cumsum(0)
    shift = (end - padded) - (count.cumsum(0) - count)
    row = torch.arange(flat.numel()) + shift.repeat_interleave(count)
    bounds = [0, *end.tolist()]
    inverse = torch.empty_like(order)
    inverse[order] = row
    token = torch.zeros(bounds[-1], dtype=torch.long)
    token[row] = order // index.shape[1]
    gates = gate.new_zeros(bounds[-1])
    gates[row] = gate.reshape(-1)[order]
    segments = [(e, bounds[e], bounds[e + 1]) for e in range(experts) if bounds[e + 1] > bounds[e]]
    return Routes(segments, inverse, token, gates)


class Experts(torch.autograd.Function):
    """Weighted sum of the routed experts' FFNs: one GEMM per expert and matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, gate: Tensor) -> Tensor:
        """x [T, H]; gate_up [E, 2I, H]; down [E, H, I]; index, gate [T, k] -> [T, H]."""
        routes = sort_routes(index, gate, gate_up.shape[0])
        rows, inner = x[routes.token], down.shape[2]
        hidden = x.new_empty(len(rows), 2 * inner)
        out = x.new_empty(len(rows), x.shape[1])
        for e, s, t in routes.segments:
            torch.mm(rows[s:t], gate_up[e].t(), out=hidden[s:t])
        active = F.silu(hidden[:, :inner]) * hidden[:, inner:]
        for e, s, t in routes.segments:
            torch.mm(active[s:t], down[e].t(), out=out[s:t])
        picked = out[routes.inverse].view(*index.shape, -1)
        ctx.save_for_backward(rows, hidden, active, picked, gate_up, down)
        ctx.routes = routes
        return torch.bmm(gate.unsqueeze(1), picked).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, gate_up, down and gate."""
        rows, hidden, active, picked, gate_up, down = ctx.saved_tensors
        routes, grad = ctx.routes, grads[0].contiguous()
        d_gate = torch.bmm(picked, grad.unsqueeze(2)).squeeze(2)
        d_out = grad[routes.token] * routes.gate.unsqueeze(1)
        d_active, d_down = torch.empty_like(active), torch.zeros_like(down)
        for e, s, t in routes.segments:
            torch.mm(d_out[s:t], down[e], out=d_active[s:t])
            torch.mm(d_out[s:t].t(), active[s:t], out=d_down[e])
        d_hidden = swiglu_backward(hidden, d_active)
        d_rows, d_gate_up = torch.empty_like(rows), torch.zeros_like(gate_up)
        for e, s, t in routes.segments:
            torch.mm(d_hidden[s:t], gate_up[e], out=d_rows[s:t])
            torch.mm(d_hidden[s:t].t(), rows[s:t], out=d_gate_up[e])
        d_x = d_rows[routes.inverse].view(picked.shape).sum(1)
        return d_x, d_gate_up, d_down, None, d_gate


def swiglu_backward(hidden: Tensor, grad: Tensor) -> Tensor:
    """hidden [N, 2I] = gate and up; grad [N, I] of silu(gate) * up -> gradient of hidden."""
    gate, up = hidden.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    out = torch.empty_like(hidden)
    inner = gate.shape[1]
    torch.mul(grad, silu, out=out[:, inner:])
    torch.mul(grad * up, sigmoid + silu * (1 - sigmoid), out=out[:, :inner])
    return out


def cross_entropy(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, V]; truth [n, 1] -> summed cross-entropy (nats), its gradient [n, V] in logits' type."""
    x = logits.float()
    x = x - x.amax(-1, keepdim=True)
    e = x.exp()
    total = e.sum(-1, keepdim=True)
    hit = torch.arange(x.shape[1]) == truth
    entropy = (total.log() - x.gather(1, truth)).sum()
    return entropy, (e / total - hit.float()).to(logits.dtype)


def distill(logits: Tensor, truth: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """As ``cross_entropy``; the gradient follows the teacher's distribution and, by HARD, the truth."""
    x = logits.float()
    x = x - x.amax(-1, keepdim=True)
    e = x.exp()
    total = e.sum(-1, keepdim=True)
    hit = (torch.arange(x.shape[1]) == truth).float()
    wanted = HARD * hit + (1 - HARD) * teacher.float().softmax(-1)
    entropy = (total.log() - x.gather(1, truth)).sum()
    return entropy, (e / total - wanted).to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    """Tied head and cross-entropy in blocks; with a teacher, a mix of its distribution and the truth.

    The gradients are computed in the forward pass, while a block's logits are still in cache.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, target: Tensor, teacher: Tensor | None) -> Tensor:
        """h [N, H]; weight [V, H]; target [N]; teacher [N, V] logits -> mean cross-entropy (nats)."""
        n = h.shape[0]
        d_h, d_weight = torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float32)
        for s in range(0, n, CHUNK):
            part, truth = h[s : s + CHUNK], target[s : s + CHUNK, None]
            logits = part @ weight.t()
            if teacher is None:
                entropy, grad = cross_entropy(logits, truth)
            else:
                entropy, grad = distill(logits, truth, teacher[s : s + CHUNK])
            loss += entropy
            grad = grad.div_(n)
            d_h[s : s + CHUNK] = grad @ weight
            d_weight += grad.t() @ part
        ctx.save_for_backward(d_h, d_weight.to(weight.dtype))
        return loss / n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has computed."""
        d_h, d_weight = ctx.saved_tensors
        return d_h * grads[0].to(d_h.dtype), d_weight * grads[0].to(d_weight.dtype), None, None


class FakeQuant(torch.autograd.Function):
    """Symmetric 4-bit rounding in groups of 64 inputs, straight-through: training feels the rounding."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """weight [..., inputs] -> the same shape on the 4-bit grid."""
        return fake_quant(weight, 4, 64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient passes unchanged."""
        return grads[0]


def fake_quant(weight: Tensor, bits: int, group: int) -> Tensor:
    """Round to a symmetric grid with one scale per ``group`` inputs (last axis)."""
    top = 2 ** (bits - 1) - 1
    grouped = weight.reshape(-1, group)
    scale = grouped.abs().amax(1, keepdim=True).clamp_min(1e-8) / top
    rounded: Tensor = torch.round(grouped / scale).clamp_(-top, top) * scale
    return rounded.view(weight.shape)
