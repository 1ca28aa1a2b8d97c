"""What routers do, in expectation: how many experts a batch touches, and how many of them are resident."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


def distinct_experts(
    tokens: float, experts: int, top_k: int, popularity: Sequence[float] | None = None
) -> float:
    """Distinct experts of one layer that `tokens` tokens use, expected.

    popularity: how likely a token uses each expert (measured; they add up to top_k); None: all alike, which
    gives the most. Tokens are taken as independent; neighbours in a text are not and use fewer (published:
    15.4 instead of 19.8 for two tokens of a model with 512 experts, top 10).
    """
    shares = popularity or (top_k / experts,) * experts
    return math.fsum(1 - math.pow(1 - min(1.0, share), tokens) for share in shares)


@dataclass(frozen=True)
class HitCurve:
    """Share of accesses that find their expert resident, by the share of a model's experts that are.

    points: (share resident, share of hits), rising, between (0, 0) and (1, 1); linear in between.
    """

    points: tuple[tuple[float, float], ...]
    source: str

    def hits(self, resident: float) -> float:
        """The hit rate; `resident` outside of 0 to 1 counts as 0 or 1."""
        corners = ((0.0, 0.0), *self.points, (1.0, 1.0))
        resident = min(1.0, max(0.0, resident))
        right = min(bisect_right(corners, resident, key=lambda corner: corner[0]), len(corners) - 1)
        (x0, y0), (x1, y1) = corners[right - 1], corners[right]
        return y0 + (y1 - y0) * (resident - x0) / (x1 - x0)


UNIFORM = HitCurve((), "uniform routing: no locality at all")
"""The floor: a router without any preference. Real ones are above it."""

# LRU during decoding. Real models differ more than any formula tells: record a trace of yours.
_MANY = HitCurve(
    ((49 / 512, 0.736), (0.5, 0.92)),
    "published trace of Qwen3.8-Flash-Next (512 experts, top 10; jiro-prog/llamacpp-moe-expert-cache)",
)
_SOME = HitCurve(
    ((8 / 128, 0.424), (16 / 128, 0.647), (32 / 128, 0.81), (64 / 128, 0.918)),
    "published traces of Qwen3-30B-A3B (128 experts, top 8; gajsanders/moe-trace)",
)
_FEW = HitCurve(
    (
        (8 / 64, 0.153),
        (12 / 64, 0.265),
        (16 / 64, 0.357),
        (24 / 64, 0.497),
        (32 / 64, 0.625),
        (48 / 64, 0.845),
    ),
    "replay of a public trace of OLMoE (64 experts, top 8; layer 0, GSM8K)",
)
_HANDFUL = HitCurve(
    ((2 / 8, 0.343), (3 / 8, 0.481), (4 / 8, 0.601), (6 / 8, 0.804)),
    "replay of a public trace of Mixtral 8x7B (8 experts, top 2; HumanEval)",
)
_CURVES = ((384, _MANY), (97, _SOME), (33, _FEW), (0, _HANDFUL))


def published_curve(experts: int) -> HitCurve:
    """The curve of the published model whose number of experts is nearest."""
    return next(curve for least, curve in _CURVES if experts >= least)


def batch_hits(curve: HitCurve, slots: float, experts: int, top_k: int, tokens: float) -> float:
    """Hit rate of a batch of `tokens` sequences with `slots` slots per layer.

    Sequences of a batch share the slots but not their favourites: the slots of one are taken as fewer by the
    factor by which the batch touches more experts than one token does (assumed). Never below slots / experts.
    """
    crowd = distinct_experts(tokens, experts, top_k) / top_k
    return max(UNIFORM.hits(slots / experts), curve.hits(slots / experts / max(1.0, crowd)))
