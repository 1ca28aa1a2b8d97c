"""`strata eval compare` beside llama.cpp's `--kl-divergence`: the same GGUF files, text and windows.

    python scripts/compare_kl.py --llama ~/llama --work /tmp/kl base.gguf other.gguf
    python scripts/compare_kl.py --llama ~/llama --work /tmp/kl smollm2 --types Q4_0,Q4_K_M

BASE and OTHER are GGUF files, or smollm2; --types makes more OTHERs out of BASE with llama-quantize. Both
programs score the second half of each window, from the same token ids: this script reads them from
llama.cpp's file of logits and stops where Strata's tokenizer gave others. Strata runs twice, with int8
activations (which llama.cpp has for quantized weights) and with f32; its KV cache is f32, llama.cpp's f16.

llama.cpp keeps the base's log-probabilities in 16 bits over a range of 16 nats per token, so that its
divergence of a model from itself is not 0.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.errors import StrataError, UsageError
from strata.interfaces.bundled import model_path
from strata.interfaces.evaluation.subject import Asked
from strata.interfaces.evaluation.texts import PROSE, Cut, Text, read_text
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer

_NUMBER = r"\s*:\s*(-?[\d.]+)"
_LINES = {
    "perplexity, base": rf"Mean PPL\(base\){_NUMBER}",
    "perplexity": rf"Mean PPL\(Q\){_NUMBER}",
    "ratio": rf"Mean PPL\(Q\)/PPL\(base\){_NUMBER}",
    "KL mean": rf"Mean\s+KLD{_NUMBER} ± +([\d.]+)",
    "KL median": rf"Median\s+KLD{_NUMBER}",
    "KL 99 %": rf"99.0%\s+KLD{_NUMBER}",
    "KL largest": rf"Maximum KLD{_NUMBER}",
    "same top token": rf"Same top p{_NUMBER}",
}
_KV = "kv.dtype=f32"


@dataclass(frozen=True)
class Llama:
    """llama.cpp's programs and what both sides are given."""

    folder: Path
    work: Path
    text: Path
    cut: Cut
    threads: int

    @property
    def logits(self) -> Path:
        """Of the base, from `score_base` on: 2 bytes per token and word of the vocabulary."""
        return self.work / "base.kld"

    def score_base(self, model: Path) -> list[tuple[int, ...]]:
        """Writes the base's log-probabilities; returns the windows of token ids that they belong to."""
        self._run(model, "-f", str(self.text), "--save-all-logits", str(self.logits))
        return logged_windows(self.logits.open("rb").read(12 + 12 + 4 * (self.cut.tokens or 0)))

    def compare(self, model: Path) -> dict[str, float]:
        """What --kl-divergence prints about a model beside the base."""
        return parse(self._run(model, "--kl-divergence-base", str(self.logits), "--kl-divergence"))

    def _run(self, model: Path, *arguments: str) -> str:
        window = str(self.cut.window)
        chunks = str((self.cut.tokens or 0) // self.cut.window)
        sizes = ["-c", window, "-b", window, "-t", str(self.threads), "--chunks", chunks]
        command = [str(self.folder / "llama-perplexity"), "-m", str(model), *sizes, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise UsageError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
        return done.stdout + done.stderr


def logged_windows(head: bytes) -> list[tuple[int, ...]]:
    """The tokens in llama.cpp's file of logits: "_logits_", u32 window, i32 vocabulary, i32 chunks, ids."""
    if head[:8] != b"_logits_":
        raise UsageError(
            "llama-perplexity wrote another kind of file", remedy="use the version in peers/build.py"
        )
    window, _, chunks = struct.unpack_from("<Iii", head, 8)
    ids = struct.unpack_from(f"<{window * chunks}i", head, 20)
    return [ids[start : start + window] for start in range(0, len(ids), window)]


def parse(output: str) -> dict[str, float]:
    """The figures of a --kl-divergence run; UsageError where one is missing."""
    found = {}
    for name, pattern in _LINES.items():
        match = re.search(pattern, output)
        if match is None:
            raise UsageError(f"llama-perplexity printed no line for {name!r}:\n{output[-2000:]}")
        found[name] = float(match[1])
        if match.re.groups > 1:
            found["KL error"] = float(match[2])
    found["same top token"] /= 100
    return found


def strata_figures(base: Path, other: Path, llama: Llama, activations: str) -> dict[str, float]:
    """The same names from `strata eval compare`."""
    cut = llama.cut
    sizes = ["--window", str(cut.window), "--tokens", str(cut.tokens), "--second-half", "--samples", "0"]
    settings = ["--set", _KV, "--set", f"backend.activations={activations}", "--text", str(llama.text)]
    command = [sys.executable, "-m", "strata", "eval", "compare", str(base), str(other), *sizes, *settings]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    kl = found["kl"]
    return {
        "perplexity, base": found["a"]["perplexity"],
        "perplexity": found["b"]["perplexity"],
        "ratio": 1 + found["perplexity_change"],
        "KL mean": kl["mean"],
        "KL error": kl["mean_error"],
        "KL median": kl["median"],
        "KL 99 %": kl["p99"],
        "KL largest": kl["max"],
        "same top token": found["top1"],
    }


def check_tokens(logged: Sequence[Sequence[int]], text: Text) -> None:
    """UsageError unless both programs read the same ids."""
    # llama.cpp logs the ids before it puts BOS over each window's first.
    mine, theirs = ([tuple(window[1:]) for window in windows] for windows in (text.windows, logged))
    if mine != theirs:
        odd = sum(a != b for a, b in zip(mine, theirs, strict=False)) + abs(len(mine) - len(theirs))
        raise UsageError(f"{odd} of {len(theirs)} windows have other tokens in Strata than in llama.cpp")


def table(name: str, columns: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown."""
    lines = [f"\n{name}\n", f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | {' | '.join(f'{found[row]:.6g}' for found in columns.values())} |")
    return "\n".join(lines)


def quantized(tool: Path, base: Path, types: Sequence[str], work: Path) -> list[Path]:
    """BASE in llama.cpp's own types; made once."""
    made = []
    for name in types:
        out = work / f"{base.stem}-{name}.gguf"
        if not out.exists():
            command = [str(tool), "--allow-requantize", str(base), str(out), name]
            subprocess.run(command, capture_output=True, check=True)
        made.append(out)
    return made


def main() -> int:
    """Exit status: 0, or 1 with one message for what is expected to go wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("others", nargs="*", metavar="OTHER")
    programs = "with llama-perplexity (and llama-quantize)"
    parser.add_argument("--llama", type=Path, required=True, help=f"folder {programs}")
    parser.add_argument("--types", default="", help="made out of BASE: Q4_0,Q4_K_M")
    parser.add_argument("--work", type=Path, required=True, help="folder for logits and models")
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--chunks", type=int, default=8, help="windows [8]; 25 MB of logits each, with 49,152 ids"
    )
    parser.add_argument("--threads", type=int, default=2, help="llama.cpp's [2]")
    options = parser.parse_args()
    try:
        compare(options)
    except StrataError as error:
        print(f"compare_kl: {error}", file=sys.stderr)
        return 1
    return 0


def compare(options: argparse.Namespace) -> None:
    """A table for each OTHER."""
    options.work.mkdir(parents=True, exist_ok=True)
    cut = Cut(options.window, options.window * options.chunks, second_half=True)
    llama = Llama(options.llama, options.work, options.text, cut, options.threads)
    base = model_path(options.base)
    others = [*map(model_path, options.others)]
    others += quantized(
        options.llama / "llama-quantize", base, [t for t in options.types.split(",") if t], options.work
    )
    tokenizer = Tokenizer.load(store_path(Asked(str(base)).config(), exact=True))
    check_tokens(llama.score_base(base), read_text(options.text, tokenizer, cut))
    for other in others:
        columns = {"llama.cpp": llama.compare(other)}
        for activations in ("int8", "f32"):
            columns[f"Strata, {activations}"] = strata_figures(base, other, llama, activations)
        print(table(f"{other.name} beside {base.name}", columns), flush=True)


if __name__ == "__main__":
    sys.exit(main())
