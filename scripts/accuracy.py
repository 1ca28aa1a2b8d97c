"""What int8 activations and the kinds of KV cache cost in accuracy: all in one pass over a text.

    python scripts/accuracy.py demo
    python scripts/accuracy.py smollm2 --tokens 2048          # three minutes: the reference is slow
    python scripts/accuracy.py smollm2 --truth f32            # the whole text

It is `strata eval compare MODEL --set-a ... --set-b ...` for six settings of the cpu backend at once, against
a truth that is computed a single time: the reference backend with an f32 KV cache, or with `--truth f32` the
cpu backend's f32 arithmetic, which is 20 times faster (the first line of a table with the reference says how
close the two are). All are of the same store: what its own 4 bits cost is not in these figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from strata.engine.perplexity import Comparison, Predictions, compare
from strata.interfaces.evaluation.subject import Asked, Subject
from strata.interfaces.evaluation.texts import PROSE, Cut, read_text

VARIANTS = tuple((a, kv) for a in ("f32", "int8") for kv in ("f32", "bf16", "int8"))
"""Activations of the cpu backend, and the KV cache."""
TRUTHS = {
    "reference": ("backend.name=reference", "kv.dtype=f32"),
    "f32": ("backend.activations=f32", "kv.dtype=f32"),
}


def main() -> None:
    """A table for each model."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most [8192]")
    parser.add_argument("--window", type=int, default=1024, help="each begins without a past [1024]")
    parser.add_argument("--truth", choices=TRUTHS, default="reference")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    for model in options.models:
        begin = time.perf_counter()
        found = measure(model, options)
        count = len(next(iter(found.values())).divergences)
        print(f"\n{model}: {count} predictions, {time.perf_counter() - begin:.0f} s\n", flush=True)
        print("\n".join(table(found, options.truth)))


def measure(model: str, options: argparse.Namespace) -> dict[str, Comparison]:
    """Every variant beside the truth, by label."""
    threads = () if options.threads is None else (f"backend.threads={options.threads}",)
    # Against itself the f32 arithmetic would say nothing.
    variants = VARIANTS[1:] if options.truth == "f32" else VARIANTS
    settings = {
        f"cpu, {a} activations, {kv} KV": (f"backend.activations={a}", f"kv.dtype={kv}") for a, kv in variants
    }

    def opened(asked: tuple[str, ...]) -> Subject:
        return Subject.open(Asked(model, (*threads, *asked)), options.window, models=1 + len(settings))

    truth = opened(TRUTHS[options.truth])
    window = min(options.window, truth.spec.context)
    text = read_text(options.text, truth.tokenizer, Cut(window, options.tokens))
    others = {label: opened(asked) for label, asked in settings.items()}

    def walk(subject: Subject) -> Iterator[Predictions]:
        return subject.predictions(text.windows, second_half=False)

    return compare(walk(truth), {label: walk(one) for label, one in others.items()})


def table(found: dict[str, Comparison], truth: str) -> list[str]:
    """Markdown. The error beside a change is that of paired tokens."""
    base = next(iter(found.values())).reference
    lines = [
        "| computed by | perplexity | change | same likeliest token | mean KL, nats |",
        "|---|--:|--:|--:|--:|",
        f"| {truth}, f32 | {base.perplexity:.4f} ± {base.standard_error:.2f} | | | |",
    ]
    for label, one in found.items():
        lines.append(
            f"| {label} | {one.score.perplexity:.4f} | {one.change:+.3%} ± {one.change_error:.3%} "
            f"| {one.agreement:.2%} | {one.divergence:.2e} |"
        )
    return lines


if __name__ == "__main__":
    main()
