"""A model and a draft model whose guesses are right as often as one likes: what drafts gain, or cost.

    python scripts/speculation_pair.py MODEL DRAFT
    python scripts/speculation_pair.py stores/qwen3-30b stores/qwen3-0.6b --texts "0.8" "runs" -n 128 -r 3

What both compute is real, what they choose is scripted: weights may be random (`make_random_checkpoint.py`),
and a pair whose draft takes a tenth of a step can be tried at every acceptance. Texts are random ids, so that
n-grams find nothing in them. `0.8`: every guess is right with that chance, and the draft model always equally
sure; `knows 0.8`: some are nearly certain, others coins, and it knows which; `runs`: 40 right ones, 10 wrong
ones on average, and it does not know.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from random import Random

from strata.config import Override, load_config
from strata.core import MOST_DRAFTED
from strata.engine.bench.speculation import Workload
from strata.interfaces.speculative_bench import SpeculativeBenchmark, markdown_head, markdown_lines

Chances = Iterator[tuple[float, float]]
"""How often the guess of each place is right, and the probability that the draft model gives to it."""
PROMPT = 32


def steady(rate: float) -> Callable[[Random], Chances]:
    """The same everywhere."""

    def chances(_: Random) -> Chances:
        while True:
            yield rate, 0.9

    return chances


def known(rate: float) -> Callable[[Random], Chances]:
    """Nearly certain, likely or hardly so, `rate` on average."""
    levels = (0.98, 0.7, 0.2)
    # Half of what is not nearly certain is likely: the share that has the wanted average.
    rest = min(1.0, max(0.0, (levels[0] - rate) / (levels[0] - (levels[1] + levels[2]) / 2)))

    def chances(chosen: Random) -> Chances:
        while True:
            level = chosen.choices(levels, (1 - rest, rest / 2, rest / 2))[0]
            yield level, level

    return chances


def runs(right: int, wrong: int) -> Callable[[Random], Chances]:
    """So many of each in a row, on average."""

    def chances(chosen: Random) -> Chances:
        while True:
            for rate, length in ((1.0, right), (0.0, wrong)):
                for _ in range(int(chosen.expovariate(1 / length) + 1)):
                    yield rate, 0.9

    return chances


TEXTS: dict[str, Callable[[Random], Chances]] = {
    **{f"{rate}": steady(rate) for rate in (0.95, 0.8, 0.6, 0.3, 0.0)},
    **{f"knows {rate}": known(rate) for rate in (0.8, 0.6)},
    "runs": runs(40, 10),
}


def workload(name: str, vocabulary: int, tokens: int) -> Workload:
    """A text and what the draft model makes of it."""
    chosen = Random(name)
    text = [chosen.randrange(vocabulary) for _ in range(PROMPT + tokens + MOST_DRAFTED)]
    script, guesses = text[PROMPT:], list[tuple[int, float]]()
    for token, (rate, sure) in zip(script, TEXTS[name](chosen), strict=False):
        right = chosen.random() < rate
        guesses.append((token if right else (token + 1) % vocabulary, sure))
    return Workload(f"{name} (scripted)", text[:PROMPT], script, guesses)


def measure(options: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Lines of the table, text by text."""
    overrides = [
        Override("model.path", options.model, "MODEL"),
        Override("speculative.draft", options.draft, "DRAFT"),
        *map(Override.parse, options.set),
    ]
    bench = SpeculativeBenchmark(load_config(None, overrides), options.tokens)
    texts = [workload(name, bench.vocabulary, options.tokens) for name in options.texts]
    bench.workloads = texts
    for found in bench.results(options.rounds):
        yield markdown_lines(found)


def main() -> None:
    """The table, a text as soon as it was measured."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("draft", metavar="DRAFT")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    print(markdown_head(), flush=True)
    for lines in measure(options):
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
