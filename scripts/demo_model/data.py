"""Random training windows from the token files, mixed by domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Share of each domain until a fraction of the training time: facts first, because they need the most
# repetitions; then language; facts once more at the end, while the weights are rounded to 4 bits.
PHASES: list[tuple[float, dict[str, float]]] = [
    (0.28, {"facts": 0.36, "talk": 0.07, "prose": 0.16, "code": 0.15, "json": 0.11, "docs": 0.15}),
    (0.75, {"facts": 0.25, "talk": 0.06, "prose": 0.22, "code": 0.18, "json": 0.12, "docs": 0.17}),
    (1.00, {"facts": 0.36, "talk": 0.08, "prose": 0.19, "code": 0.15, "json": 0.09, "docs": 0.13}),
]
DOMAINS = tuple(PHASES[0][1])
LENGTHS = {256: 0.82, 512: 0.13, 1024: 0.05}  # share of the steps by sequence length
WHOLE = ("facts", "talk")  # windows of these begin where a document begins


def mix_at(fraction: float) -> dict[str, float]:
    """The domains' shares at a fraction of the training time."""
    return next((mix for until, mix in PHASES if fraction < until), PHASES[-1][1])


class Windows:
    """Windows of one split.  Step and worker seed the choice, so that resuming needs no state."""

    def __init__(self, folder: Path, split: str, seed: int = 0) -> None:
        self.tokens = {k: np.fromfile(folder / f"{k}.{split}.bin", dtype=np.uint16) for k in DOMAINS}
        self.starts = {k: np.flatnonzero(self.tokens[k] == 0) + 1 for k in WHOLE}
        self.seed = seed

    def window(self, rng: np.random.Generator, domain: str, length: int) -> np.ndarray:
        """int64 [length + 1] tokens; short files wrap around."""
        tokens = self.tokens[domain]
        if domain in WHOLE:
            starts = self.starts[domain]
            at = int(starts[rng.integers(len(starts))])
        else:
            at = int(rng.integers(len(tokens)))
        return np.take(tokens, range(at, at + length + 1), mode="wrap").astype(np.int64)

    def batch(self, step: int, rank: int, tokens: int, mix: dict[str, float]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] of one worker's step: B*T = ``tokens``, T alike for all workers."""
        length = int(np.random.default_rng([self.seed, step]).choice(list(LENGTHS), p=list(LENGTHS.values())))
        rng = np.random.default_rng([self.seed, step, rank])
        share = np.array(list(mix.values()))
        names = rng.choice(list(mix), tokens // length, p=share / share.sum())
        rows = torch.from_numpy(np.stack([self.window(rng, name, length) for name in names]))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def fixed(self, domain: str, rows: int, length: int) -> Tensor:
        """The first rows of a domain, [rows, length + 1]: the same ones at every evaluation."""
        tokens = np.resize(self.tokens[domain], rows * length + 1).astype(np.int64)
        flat = torch.from_numpy(tokens)
        return flat.unfold(0, length + 1, length).clone()
