"""What int8 activations and an int8 KV cache cost in accuracy: the cpu backend beside `reference` on a text.

    python scripts/accuracy.py demo
    python scripts/accuracy.py smollm2 --tokens 2048          # three minutes: the reference is slow
    python scripts/accuracy.py smollm2 --truth f32            # the whole text

MODEL: demo, smollm2, or any path that `strata run` takes. The truth is computed in f32 with an f32 KV cache
from the same store: what the store's own 4 bits cost is not in these figures. `--truth f32` takes the cpu
backend's f32 arithmetic for it, which is 20 times faster; the first line of a table with the reference
says how close the two are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.backends.base import Activations, Backend, KvDtype
from strata.backends.cpu import CpuBackend
from strata.config import Override, load_config
from strata.engine.perplexity import CHUNK, Comparison, Predictions, compare, predictions, split_windows
from strata.hardware.cpu import choose_cpus
from strata.interfaces.evaluation.texts import PROSE
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.model.decoder import Decoder
from strata.store.reader import Store


@dataclass(frozen=True)
class Variant:
    """How the cpu backend computes."""

    activations: Activations
    kv: KvDtype

    @property
    def label(self) -> str:
        """For the table."""
        return f"cpu, {self.activations} activations, {self.kv} KV"


VARIANTS = tuple(Variant(a, kv) for a in ("f32", "int8") for kv in ("f32", "bf16", "int8"))


@dataclass(frozen=True)
class Text:
    """A model's store and the windows of a text in its tokens."""

    store: Store
    windows: Sequence[Sequence[int]]

    @classmethod
    def of(cls, model: str, text: str, tokens: int, window: int) -> Text:
        """The first `tokens` tokens of a text."""
        store = Store.open(store_path(load_config(None, [Override("model.path", model, "MODEL")])))
        ids = Tokenizer.load(store.path).encode_completion(text)[:tokens]
        return cls(store, split_windows(ids, min(window, store.spec.context)))

    def predicted_by(self, backend: Backend, kv: KvDtype, chunk: int) -> Iterator[Predictions]:
        """What the model expects after every token."""
        return predictions(Decoder(self.store.spec, self.store, backend), self.windows, kv, chunk=chunk)


def main() -> None:
    """A table for each model."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most [8192]")
    parser.add_argument("--window", type=int, default=1024, help="each begins without a past [1024]")
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"per forward pass [{CHUNK}]; 1 is decoding")
    parser.add_argument("--truth", choices=("reference", "f32"), default="reference")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    for model in options.models:
        begin = time.perf_counter()
        found = measure(Text.of(model, text, options.tokens, options.window), options)
        count = len(next(iter(found.values())).divergences)
        print(f"\n{model}: {count} predictions, {time.perf_counter() - begin:.0f} s\n", flush=True)
        print_table(found, options.truth)


def measure(text: Text, options: argparse.Namespace) -> dict[str, Comparison]:
    """Every variant beside the truth, by label."""
    judge: Backend
    if options.truth == "f32":
        judge, variants = CpuBackend(options.threads, "f32"), VARIANTS[1:]
    else:
        from strata.backends.reference import ReferenceBackend  # torch takes seconds

        judge, variants = ReferenceBackend(threads=options.threads or len(choose_cpus().cpus)), VARIANTS
    others = {
        variant.label: text.predicted_by(
            CpuBackend(options.threads, variant.activations), variant.kv, options.chunk
        )
        for variant in variants
    }
    return compare(text.predicted_by(judge, "f32", options.chunk), others)


def print_table(found: dict[str, Comparison], truth: str) -> None:
    """Markdown. The error beside a change is that of paired tokens."""
    base = next(iter(found.values())).reference
    print("| computed by | perplexity | change | same likeliest token | mean KL, nats |")
    print("|---|--:|--:|--:|--:|")
    print(f"| {truth}, f32 | {base.perplexity:.4f} ± {base.standard_error:.2f} | | | |")
    for label, one in found.items():
        print(
            f"| {label} | {one.score.perplexity:.4f} | {one.change:+.3%} ± {one.change_error:.3%} "
            f"| {one.agreement:.2%} | {one.divergence:.2e} |"
        )


if __name__ == "__main__":
    main()
