"""Train the demo MoE, or the dense draft with the MoE as teacher, until a wall-clock deadline.

usage: python -m demo_model.train --data DIR --run DIR --out DIR --end 2026-01-31T17:00
           [--questions FILE] [--draft --teacher CHECKPOINT]
A run that was interrupted continues from DIR/state.pt with the same command.
The learning rate follows the fraction of the time that has passed, because the share of the
processor that a run gets is not known beforehand.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from tokenizers import Tokenizer
from torch import Tensor

from demo_model import model as model_code
from demo_model import ops
from demo_model.data import DOMAINS, Windows, mix_at
from demo_model.evaluate import exact_replies
from demo_model.export import load_checkpoint, save_checkpoint
from demo_model.model import DRAFT, DemoModel, ModelConfig
from demo_model.optim import Optimizer
from demo_model.team import Team

WARM_STEPS, HOLD, FINAL = 40, 0.3, 0.01  # linear warm-up; full rate until HOLD; then linear down to FINAL


@dataclass
class Run:
    """Everything of one training run that a checkpoint must hold."""

    model: DemoModel
    optimizer: Optimizer
    windows: Windows
    team: Team
    begun: float = field(default_factory=time.time)
    step: int = 0
    tokens: int = 0

    def save(self, path: Path) -> None:
        """Write the state; a reader never meets half a file."""
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "begun": self.begun, "step": self.step, "tokens": self.tokens,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Continue from ``save``."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.begun, self.step, self.tokens = state["begun"], state["step"], state["tokens"]


def learning_rate(peak: float, step: int, fraction: float) -> float:
    """Warm-up by steps, then by the fraction of the time."""
    decay = 1.0 if fraction < HOLD else max(FINAL, (1 - fraction) / (1 - HOLD))
    return peak * min(1.0, (step + 1) / WARM_STEPS) * decay


@torch.no_grad()
def validation(model: DemoModel, windows: Windows, rows: int) -> dict[str, float]:
    """Mean cross-entropy (nats per token) by domain, and their plain mean."""
    losses = {}
    for domain in DOMAINS:
        part = windows.fixed(domain, rows, 256)
        logits = model(part[:, :-1].contiguous()).float()
        losses[domain] = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).item()
    losses["mean"] = sum(losses.values()) / len(losses)
    return {k: round(v, 4) for k, v in losses.items()}


def train_step(run: Run, teacher: DemoModel | None, args: argparse.Namespace) -> float:
    """One update; returns the cross-entropy of this worker's batch (nats per token)."""
    team, fraction = run.team, float(run.team.fraction)
    ids, target = run.windows.batch(run.step, team.rank, args.batch // team.workers, mix_at(fraction))
    wanted: Tensor | None = None
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(ids).flatten(0, 1)
    run.model.set_quantized(fraction > args.quantize_from)
    loss, auxiliary = run.model.loss(ids, target, wanted)
    run.optimizer.zero_grad()
    (loss + auxiliary).backward()  # type: ignore[no-untyped-call]
    norm = team.mean_gradients(run.model)
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    for p in run.model.parameters():
        assert p.grad is not None
        p.grad.mul_(clip)
    run.optimizer.step(learning_rate(args.lr, run.step, fraction), team.rank, team.workers)
    run.step += 1
    run.tokens += ids.numel() * team.workers
    return loss.item()


def report(run: Run, args: argparse.Namespace, losses: list[float], rows: int) -> None:
    """Evaluate with the weights rounded as they will be used, log a line, export the checkpoint."""
    quantized = run.model.layers()[0].quantized
    validator = Windows(args.data, "val")
    line: dict[str, Any] = {
        "minutes": round((time.time() - run.begun) / 60, 2), "step": run.step, "tokens": run.tokens,
        "train": round(sum(losses[-50:]) / max(1, len(losses[-50:])), 4), "quantized": quantized,
        "val": validation(run.model, validator, rows),
    }  # fmt: skip
    if args.questions:
        tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
        line["facts"] = exact_replies(run.model, tokenizer, json.loads(args.questions.read_text()))
    print(json.dumps(line), flush=True)
    with (args.run / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    save_checkpoint(run.model, args.data / "tokenizer.json", args.out)
    run.save(args.run / "state.pt")


def compile_kernels() -> None:
    """Fuse the element-wise chains (needs a C++ compiler): a third less time per step."""
    for module, name in ((model_code, "rms"), (model_code, "rotate"), (ops, "swiglu_backward")):
        setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
    for name in ("cross_entropy", "distill"):
        setattr(ops, name, torch.compile(getattr(ops, name), dynamic=False))


def train(args: argparse.Namespace) -> None:
    """Train until the deadline, in ``--workers`` processes."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.compile:
        compile_kernels()
    args.run.mkdir(parents=True, exist_ok=True)
    model = DemoModel(DRAFT if args.draft else ModelConfig())
    windows = Windows(args.data, "train", args.seed)
    run = Run(model, Optimizer(model), windows, Team(args.workers, model))
    if (args.run / "state.pt").exists():
        run.load(args.run / "state.pt")
    teacher = load_checkpoint(args.teacher) if args.teacher else None
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, step {run.step}", flush=True)
    run.team.start(lambda: work(run, teacher, args))


def work(run: Run, teacher: DemoModel | None, args: argparse.Namespace) -> None:
    """One worker's loop; rank 0 keeps the time, evaluates and saves."""
    team, end = run.team, datetime.fromisoformat(args.end).timestamp()
    losses: list[float] = []
    reported = time.time() - args.report_s * 0.8  # the first checkpoint comes early: others wait for one
    while True:
        if team.rank == 0:
            team.fraction[0] = (time.time() - run.begun) / (end - run.begun)
        team.meet()
        if float(team.fraction) >= 1:
            break
        losses.append(train_step(run, teacher, args))
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"loss is {losses[-1]} at step {run.step}: start again with a lower --lr")
        team.meet()
        if team.rank == 0 and time.time() - reported > args.report_s:
            report(run, args, losses, 3)
            reported = time.time()
    if team.rank == 0:
        report(run, args, losses, 24)


def main() -> None:
    """Command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name in ("data", "run", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--end", required=True, help="local time at which training must have ended (ISO)")
    parser.add_argument("--questions", type=Path, help="fixed questions to score at each report")
    parser.add_argument("--draft", action="store_true", help="train the small dense draft")
    parser.add_argument("--teacher", type=Path, help="checkpoint whose distribution the model follows")
    parser.add_argument("--batch", type=int, default=8192, help="tokens per step, all workers together")
    parser.add_argument("--workers", type=int, default=2, help="single-threaded processes")
    parser.add_argument("--compile", action="store_true", help="fuse element-wise chains (needs g++)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--quantize-from", type=float, default=0.85, help="round weights after this fraction")
    parser.add_argument("--report-s", type=float, default=240, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
