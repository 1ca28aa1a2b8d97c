"""Checks of exported checkpoints: logits against transformers, and a draft's acceptance.

usage: python -m demo_model.compare --checkpoint DIR [--draft DIR --data DIR]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from demo_model.data import DOMAINS, Windows
from demo_model.export import load_checkpoint
from demo_model.model import DemoModel

PROMPT, REPLY, DRAFTED = 64, 64, 4  # tokens


@torch.no_grad()
def logit_gap(folder: Path) -> float:
    """Largest difference between the trainer's logits and transformers', in float32."""
    mine = load_checkpoint(folder)
    mine.set_compute(torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, mine.c.vocab, (2, 96), generator=torch.Generator().manual_seed(0))
    return float((theirs(ids).logits - mine(ids)).abs().max())


@torch.no_grad()
def greedy(model: DemoModel, ids: Tensor, count: int) -> Tensor:
    """ids [B, T] -> [B, T + count] by greedy decoding."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def accepted_per_round(match: list[bool]) -> float:
    """Drafted tokens accepted per verification when DRAFTED are proposed at a time."""
    at = accepted = rounds = 0
    while at < len(match):
        run = 0
        while run < DRAFTED and at + run < len(match) and match[at + run]:
            run += 1
        accepted, rounds, at = accepted + run, rounds + 1, at + run + 1
    return accepted / rounds


@torch.no_grad()
def acceptance(model: DemoModel, draft: DemoModel, data: Path, rows: int) -> dict[str, dict[str, float]]:
    """By domain: share of the model's greedy tokens that the draft foresees, and accepted per round."""
    windows, out = Windows(data, "val"), {}
    for domain in DOMAINS:
        ids = greedy(model, windows.fixed(domain, rows, PROMPT)[:, :PROMPT].contiguous(), REPLY)
        foreseen = draft(ids).argmax(-1)[:, PROMPT - 1 : -1] == ids[:, PROMPT:]
        rounds = [accepted_per_round(row.tolist()) for row in foreseen]
        out[domain] = {
            "foreseen": round(float(foreseen.float().mean()), 3),
            "accepted per round": round(sum(rounds) / len(rounds), 2),
        }
    return out


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--data", type=Path, help="folder with the encoded validation texts")
    args = parser.parse_args()
    for folder in filter(None, (args.checkpoint, args.draft)):
        print(f"{folder.name}: largest logit difference to transformers {logit_gap(folder):.2e}")
    if args.draft:
        pair = load_checkpoint(args.checkpoint), load_checkpoint(args.draft)
        print(json.dumps(acceptance(*pair, args.data, 8), indent=1))


if __name__ == "__main__":
    main()
