"""What busy neighbours cost decoding, with threads bound to their CPUs and free to move.

    python scripts/neighbours.py demo
    python scripts/neighbours.py ~/stores/qwen3-30b --tokens 64 --neighbours 1 2 4

A neighbour is a process that computes all the time, on whatever CPU it gets. Every line of the table is
measured in turns with the others; with as many neighbours as CPUs, half the speed is one's fair share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from strata.backends.cpu import CpuBackend
from strata.config import Override, load_config
from strata.engine.perplexity import predictions
from strata.hardware.cpu import choose_cpus
from strata.interfaces.stores import store_path
from strata.model.decoder import Decoder
from strata.store.reader import Store

_BUSY = "while True: pass"
_WARM = 4
"""Tokens before the clock starts."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many neighbours meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tokens_per_second(store: Store, bind: bool, tokens: int) -> float:
    """Of decoding, token by token."""
    backend = CpuBackend(chosen=replace(choose_cpus(), bind=bind))
    window = [7 * i % store.spec.vocab for i in range(tokens + _WARM + 1)]
    steps = predictions(Decoder(store.spec, store, backend), [window], "int8", chunk=1)
    for _ in range(_WARM):
        next(steps)
    begin = time.perf_counter()
    count = sum(1 for _ in steps)
    return count / (time.perf_counter() - begin)


def measure(store: Store, options: argparse.Namespace) -> dict[tuple[int, bool], list[float]]:
    """Tokens/s of every round by neighbours and binding."""
    found: dict[tuple[int, bool], list[float]] = {}
    for _ in range(options.rounds):
        for count in (0, *options.neighbours):
            for bind in (False, True):
                with busy(count):
                    speed = tokens_per_second(store, bind, options.tokens)
                found.setdefault((count, bind), []).append(speed)
    return found


def table(found: Mapping[tuple[int, bool], Sequence[float]]) -> str:
    """Markdown: medians, and how many times as slow that is as without neighbours."""
    lines = ["| neighbours | threads | tokens/s | times as slow |", "|--:|---|--:|--:|"]
    for (count, bind), speeds in sorted(found.items()):
        speed, idle = statistics.median(speeds), statistics.median(found[0, bind])
        lines.append(f"| {count} | {'bound' if bind else 'free'} | {speed:.1f} | {idle / speed:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """The table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    options = parser.parse_args()
    store = Store.open(store_path(load_config(None, [Override("model.path", options.model, "MODEL")])))
    print(table(measure(store, options)))


if __name__ == "__main__":
    main()
