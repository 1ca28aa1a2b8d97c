"""Decoding a model that is larger than memory: Strata's disk tier beside the system's page cache, in turns.

    python scripts/disk_tier.py STORE --favour 1.0
    python scripts/disk_tier.py STORE --favour 0 --rounds 3 --json tier.json

Each turn is a process of its own in a control group whose memory limit is the store's size / --times. "tier"
holds experts in memory of its own and reads the others past the page cache; "mmap" maps the store, and the
kernel decides what stays. Both decode random tokens. Before each turn the store leaves the page cache; the
first seconds of a turn fill the memory and do not count. Bytes read are what the kernel counts for the
process (/proc/self/io). The disk is probed before and after each turn by the reader of the tier, 8 at a time.

Routers of random weights choose what no trained model would: without --favour they choose. With it, both are
given the same routes: top_k experts drawn anew for every token and layer, the expert of rank r in its layer
with the weight (r + 4)^-FAVOUR. 0 is uniform, the worst case. Neighbouring tokens have nothing in common
then, which traces of real models have. The mode "foresee" is "tier" with guesses of the next layer's forced
routes, of which the share --known is right.

Needs root and version 1 or 2 of the memory controller; an idle machine is the caller's business.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# The package is imported from the tree, so that what is measured is what stands here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from strata.backends.composed import ComposedOps
from strata.backends.parts import Array, Layer, RoutedFfn, Router, Routing
from strata.core import ExpertId, Request, SamplingParams
from strata.engine.bench.runs import RandomTokens
from strata.engine.engine import Engine
from strata.engine.load import load_engine, plan_store
from strata.engine.tier import POLICY, load_heat, open_tier
from strata.hardware.host_memory import meminfo
from strata.hardware.probe import probe
from strata.memory.expert_host import HostExperts
from strata.memory.host_arena import host_arena
from strata.model.decoder import Decoder
from strata.plan.options import PlanOptions
from strata.store.expert_reader import READ_THREADS, ExpertReader
from strata.store.reader import Store

MODES = ["tier", "foresee", "mmap"]
MARGIN = 160 << 20
"""Of the limit, for what the process takes while it runs; the tier's memory is what remains."""
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def main() -> int:
    """Exit status: 0, or 1 where no memory limit can be set."""
    options = parse()
    if options.child:
        print(json.dumps(run(options)))
        return 0
    try:
        rows = list(turns(options))
    except OSError as error:
        print(f"disk_tier: no memory limit can be set here: {error}", file=sys.stderr)
        return 1
    report(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("store", type=Path)
    parser.add_argument("--times", type=float, default=1.5, help="store's size / memory limit")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of turns")
    parser.add_argument("--warm", type=float, default=6.0, help="seconds that do not count")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds that count")
    parser.add_argument("--favour", type=float, help="how much some experts are favoured, 0 = not at all")
    parser.add_argument("--known", type=float, default=0.8, help="share of guesses that are right in foresee")
    parser.add_argument("--policy", default=None, help="of the tier")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["tier", "mmap"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def turns(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per turn."""
    files = [path for path in options.store.rglob("*") if path.is_file()]
    limit = int(sum(path.stat().st_size for path in files) / options.times)
    for number in range(options.rounds):
        for mode in options.modes:
            forget(files)
            before = disk_speed(options.store)
            row = in_group(limit, [*sys.argv, "--child", mode, "--limit", str(limit)])
            row |= {
                "round": number,
                "mode": mode,
                "limit": limit,
                "disk": [before, disk_speed(options.store)],
            }
            describe(row)
            yield row


def forget(files: list[Path]) -> None:
    """The page cache lets go of the store."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_speed(path: Path, seconds: float = 0.7) -> float:
    """Bytes/s of direct reads of random experts."""
    store = Store.open(path)
    reader = ExpertReader(store)
    layers, chance = list(store.manifest.layers), random.Random()
    sizes = {layer: record.layout().record_bytes for layer, record in store.manifest.layers.items()}
    memory = host_arena(READ_THREADS * max(sizes.values())).memory.reshape(READ_THREADS, -1)
    free, places = list(range(READ_THREADS)), {}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        while free:
            expert = ExpertId(chance.choice(layers), chance.randrange(store.manifest.expert_count))
            into = memory[free[-1], : sizes[expert.layer]]
            places[reader.submit(expert, into, urgent=True)] = free.pop()
        for ticket, problem in reader.finished(1.0):
            if problem is not None:
                raise problem
            free.append(places.pop(ticket))
    found = reader.totals().bandwidth
    reader.close()
    return found


def in_group(limit: int, command: list[str]) -> dict[str, Any]:
    """Run a turn under a memory limit; what it printed. OSError where there can be none."""
    with memory_group(limit) as group:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group with that memory limit."""
    parent = next((path for path in GROUPS if is_memory_group(path)), None)
    if parent is None:
        raise OSError(f"no memory controller at {' or '.join(map(str, GROUPS))}")
    group = parent / f"strata-disk-tier-{os.getpid()}"
    group.mkdir()
    try:
        file = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / file).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def is_memory_group(path: Path) -> bool:
    """Whether groups made there can have a memory limit."""
    if (path / "memory.limit_in_bytes").exists():
        return True
    control = path / "cgroup.subtree_control"
    return control.exists() and "memory" in control.read_text().split()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """A turn: this process is in the group already."""
    store = Store.open(options.store)
    plan = plan_store(options.store, probe("this", "avx2"), PlanOptions(context=4096, kv_bytes=256 << 20))
    plan = replace(plan, host=replace(plan.host, disk_bytes=0))
    engine = load_engine(options.store, plan, share_prefixes=False)
    held = 0
    if options.child != "mmap":
        shared = store.manifest.files[0].bytes
        room = options.limit - anonymous_bytes() - shared - MARGIN
        held = room // max(record.layout().record_bytes for record in store.manifest.layers.values())
        tier = open_tier(store, held, load_heat(store).heat, policy=options.policy or POLICY)
        engine.decoder = engine.executor.decoder = Decoder(store.spec, store, engine.decoder.backend, tier)
    if options.favour is not None:
        known = options.known if options.child == "foresee" else None
        decoder = engine.decoder
        ForcedRoutes(decoder.backend, decoder.layers, options.favour, known, decoder.tier is not None)
    request = Request("turn", [1], SamplingParams(max_tokens=4000))
    engine.add(request, RandomTokens(engine.options.valid_tokens, 1))
    decode(engine, options.warm)
    before = read_bytes(), hits_of(engine.decoder)
    tokens, seconds = decode(engine, options.seconds)
    asked, missed = (now - then for now, then in zip(hits_of(engine.decoder), before[1], strict=True))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "read": read_bytes() - before[0],
        "held": held,
        "experts": len(store.manifest.layers) * store.manifest.expert_count,
        "hit_rate": 1 - missed / asked if asked else None,
        "guesses": guesses_of(engine.decoder.tier),
    }


def guesses_of(tier: HostExperts | None) -> dict[str, Any]:
    """What was read ahead, and how many guesses of each rank were right lately."""
    if tier is None:
        return {}
    found = tier.statistics
    trust = [round(share, 2) for share in tier.foresight.trust[:8]]
    return {"read": found.guessed, "right": found.right, "dropped": found.dropped, "trust": trust}


class ForcedRoutes:
    """Routers are asked, for the time that takes, but do not choose: see the beginning of this file."""

    def __init__(
        self, backend: Any, layers: Sequence[Layer], favour: float, known: float | None, tiered: bool
    ) -> None:
        """known: the share of guesses of the next layer's experts that are right; None: no guesses."""
        self._chance = np.random.default_rng(7)
        self._ask = backend.choose_experts
        self._known = known
        self._weights: dict[int, NDArray[np.float64]] = {}
        self._next: dict[int, list[int]] = {}
        for ffn in (layer.ffn for layer in layers if isinstance(layer.ffn, RoutedFfn)):
            weights = (self._chance.permutation(ffn.router.spec.experts) + 4.0) ** -favour
            self._weights[id(ffn.router)] = weights / weights.sum()
        backend.choose_experts = self.choose
        backend._foresee = self.foresee
        if not tiered:
            # Layer by layer as well: one call for all layers would ask the routers itself.
            backend.run_layers = partial(ComposedOps.run_layers, backend)

    def choose(self, residual: Array, router: Router) -> Routing:
        """Instead of the backend's: the time it takes, other ids."""
        routing: Routing = self._ask(residual, router)
        count = routing.ids.shape[1]
        rows = [self._next.pop(id(router), []) or self._draw(router, count) for _ in routing.ids]
        return routing._replace(ids=np.array(rows, np.int32))

    def foresee(self, residual: Array, layer: Layer) -> None:
        """Instead of the backend's: draws the next layer's routes now and guesses them in part."""
        if self._known is None or not isinstance(layer.ffn, RoutedFfn):
            return
        router, bank = layer.ffn.router, layer.ffn.experts.bank
        drawn = self._next[id(router)] = self._draw(router, router.spec.top_k)
        others = self._chance.integers(router.spec.experts, size=len(drawn)).tolist()
        right = (self._chance.random(len(drawn)) < self._known).tolist()
        guess = [index if hit else other for index, other, hit in zip(drawn, others, right, strict=True)]
        assert bank.tier is not None
        bank.tier.expect(bank.layer, list(dict.fromkeys(guess)))

    def _draw(self, router: Router, count: int) -> list[int]:
        share = self._weights[id(router)]
        drawn: list[int] = self._chance.choice(len(share), count, False, share).tolist()
        return drawn


def decode(engine: Engine, seconds: float) -> tuple[int, float]:
    """Tokens decoded in about so many seconds, and in how many."""
    begin, tokens = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds or tokens == 0:
        for event in engine.step():
            if event.request.error is not None:
                raise event.request.error
            tokens += 1
    return tokens, spent


def hits_of(decoder: Decoder) -> tuple[int, int]:
    """Experts that the tier was asked for, and that it did not have."""
    if decoder.tier is None:
        return 0, 0
    found = decoder.tier.cache.statistics
    return found.hits + found.misses, found.misses


def read_bytes() -> int:
    """What this process made the disk read."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    return meminfo(Path("/proc/self/status"), "RssAnon") or 0


def describe(row: dict[str, Any]) -> None:
    """A line per turn."""
    rate, each = row["tokens"] / row["seconds"], row["read"] / row["tokens"]
    hits = f", hits {row['hit_rate']:.1%}, {row['held']} of {row['experts']} experts" if row["held"] else ""
    hits += f", guesses {row['guesses']}" if row["guesses"] else ""
    disk = " and ".join(f"{speed / 1e6:.0f}" for speed in row["disk"])
    print(
        f"{row['mode']}: {rate:.2f} tokens/s, {each / 1e6:.1f} MB read per token, "
        f"{row['read'] / row['seconds'] / 1e6:.0f} MB/s; the disk alone {disk} MB/s{hits}",
        flush=True,
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Ratios pair by pair."""
    rates = {(row["round"], row["mode"]): row["tokens"] / row["seconds"] for row in rows}
    for mode in MODES[:-1]:
        pairs = [(rate, rates.get((at, "mmap"))) for (at, name), rate in rates.items() if name == mode]
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        if ratios:
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{mode} / mmap: median {median(ratios):.2f} of {each}")


if __name__ == "__main__":
    sys.exit(main())
