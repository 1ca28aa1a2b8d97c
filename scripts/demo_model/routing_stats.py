"""How local and how even the router's choices are: what a cache of expert slots can hope for.

usage: python -m demo_model.routing_stats --checkpoint DIR --data DIR [--slots 6,8,12,16]
Prints JSON: hit rates of LRU and of Belady's optimal policy per layer, load per expert, reuse.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo_model.data import DOMAINS, Windows
from demo_model.export import load_checkpoint
from demo_model.model import DemoModel

LENGTH = 256  # tokens per text


def lru_hits(routes: np.ndarray, slots: int) -> float:
    """routes [tokens, k] of one layer -> share of expert uses found among the last ``slots`` used."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in routes.reshape(-1).tolist():
        hits += expert in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > slots:
            held.popitem(last=False)
    return hits / routes.size


def belady_hits(routes: np.ndarray, slots: int) -> float:
    """The best possible: evict the expert whose next use is farthest away."""
    uses = routes.reshape(-1).tolist()
    following, last = [0] * len(uses), dict[int, int]()
    for i in range(len(uses) - 1, -1, -1):
        following[i] = last.get(uses[i], len(uses))
        last[uses[i]] = i
    held: dict[int, int] = {}
    hits = 0
    for i, expert in enumerate(uses):
        if expert in held:
            hits += 1
        elif len(held) >= slots:
            held.pop(max(held, key=lambda e: held[e]))
        held[expert] = following[i]
    return hits / len(uses)


def reuse(routes: np.ndarray) -> float:
    """Share of a token's experts that the token before it used as well."""
    pairs = zip(routes[1:], routes[:-1], strict=True)
    return float(np.mean([len(set(a.tolist()) & set(b.tolist())) / len(a) for a, b in pairs]))


@torch.no_grad()
def record(model: DemoModel, data: Path, texts: int) -> np.ndarray:
    """Routes [layers, tokens, k] of held-out texts, domain after domain in turns."""
    windows = Windows(data, "val")
    layers: list[list[np.ndarray]] = [[] for _ in range(model.c.layers)]
    rows = {domain: windows.fixed(domain, texts, LENGTH)[:, :-1] for domain in DOMAINS}
    for text in range(texts):
        for domain in DOMAINS:
            found: list[torch.Tensor] = []
            model(rows[domain][text : text + 1].contiguous(), found)
            for layer, index in zip(layers, found, strict=True):
                layer.append(index.numpy())
    return np.stack([np.concatenate(parts) for parts in layers])


def load(routes: np.ndarray, experts: int) -> dict[str, float]:
    """Share of the uses that the most, the least and the quarter of most used experts get."""
    counts = Counter(routes.reshape(-1).tolist())
    shares = np.sort([counts[e] / routes.size for e in range(experts)])[::-1]
    return {
        "largest": round(float(shares[0]), 4),
        "smallest": round(float(shares[-1]), 4),
        "top quarter": round(float(shares[: experts // 4].sum()), 4),
    }


def statistics(routes: np.ndarray, experts: int, slots: list[int]) -> dict[str, Any]:
    """All figures, per layer and averaged; 'shuffled' has the same experts without their order."""
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {"tokens": routes.shape[1], "load": [load(r, experts) for r in routes]}
    out["reuse of the previous token's experts"] = [round(reuse(r), 3) for r in routes]
    for n in slots:
        shuffled = [lru_hits(rng.permutation(r), n) for r in routes]
        lru, best = [lru_hits(r, n) for r in routes], [belady_hits(r, n) for r in routes]
        out[f"{n} slots"] = {
            "lru": [round(h, 3) for h in lru],
            "belady": [round(h, 3) for h in best],
            "mean": {
                "lru": round(float(np.mean(lru)), 3),
                "belady": round(float(np.mean(best)), 3),
                "lru, shuffled tokens": round(float(np.mean(shuffled)), 3),
            },
        }
    return out


def main() -> None:
    """Print the statistics of a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with the encoded validation texts")
    parser.add_argument("--slots", default="6,8,12,16", help="expert slots per layer, comma-separated")
    parser.add_argument("--texts", type=int, default=4, help="texts of 256 tokens per domain")
    args = parser.parse_args()
    model = load_checkpoint(args.checkpoint)
    routes = record(model, args.data, args.texts)
    slots = [int(n) for n in args.slots.split(",")]
    print(json.dumps(statistics(routes, model.c.experts, slots), indent=1))


if __name__ == "__main__":
    main()
