"""`strata trace`: recorded expert accesses, replayed and imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from strata.errors import UsageError

if TYPE_CHECKING:  # commands import what is heavy when they run
    from strata.memory.trace import TraceSource

_MAX_PARTS = 64


class Slots(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Numbers of slots, or shares of all experts, comma-separated: "25%,50%,64"."""

    name = "slots"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The parts as they are; fails for what is neither."""
        parts = [part.strip() for part in str(value).split(",")]
        for part in parts:
            number = part.removesuffix("%")
            share = part.endswith("%")
            plain = number.isascii() and number.isdecimal() and len(number) < 9
            if not plain or (share and int(number) > 100):
                self.fail(f"{part!r}: slots are numbers or shares up to 100%, e.g. 25%,50%,64", param, ctx)
        if len(parts) > _MAX_PARTS:
            self.fail(f"{len(parts)} numbers of slots, at most {_MAX_PARTS}", param, ctx)
        return list(dict.fromkeys(parts))


@click.group("trace", short_help="How well would a cache of N expert slots do?")
def command() -> None:
    """Recorded expert accesses: how well would a cache of N slots do?

    `strata run MODEL --record-trace FILE` records one while it answers.

    \b
    Examples:
      strata run demo --prompt "Hello" --record-trace hello.trace
      strata trace replay decode_routes.csv.gz --slots 25%,50%
    """


@command.command("replay")
@click.argument("trace", metavar="TRACE")
@click.option("--slots", type=Slots(), default="25%,50%", help="Slots: 64, or 25% of the experts. [25%,50%]")
@click.option(
    "--policy", "policies", default="all", help="Comma-separated, or all. Belady's bound is always shown."
)
@click.option("--only", metavar="NAME", help="Of a CSV with several traces, those whose name has NAME in it.")
@click.option("--inserts", type=click.IntRange(0), metavar="N", help="Bound on inserts per step.")
@click.option("--admit-all", is_flag=True, help="Admit every miss: compares evictions alone.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Hit rate over slots.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def replay(
    trace: str,
    slots: list[str],
    policies: str,
    only: str | None,
    inserts: int | None,
    admit_all: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace through the expert cache, every policy beside Belady's bound.

    TRACE is a file that Strata recorded (docs/trace-format.md), or a CSV (may be gzipped) with the columns
    trace,seq,layer,step,experts. One cache serves all layers; it begins empty and is not reset between
    requests. moved: bytes copied into slots.

    \b
    Examples:
      strata trace replay night.trace --slots 10%,25%,50%,75% --plot hits.svg
      strata trace replay decode_routes.csv.gz --only mixtral --policy lru,forecast --json
    """
    import json

    from strata.interfaces import replay_report
    from strata.interfaces.terminal import note, printable
    from strata.interfaces.traces import open_traces
    from strata.memory.replay import ReplayOptions, replay_all

    names = _policies(policies)
    options = ReplayOptions(inserts, admit_all)
    sources = open_traces(Path(trace), only)
    if plot and len(sources) > 1:
        raise UsageError(
            f"--plot draws one trace, {trace} has {len(sources)}", remedy="choose one with --only"
        )
    reports = []
    for source in sources:
        counts = [_count(part, source) for part in slots]
        results = list(replay_all(source, list(dict.fromkeys(counts)), names, options))
        if getattr(source, "torn", False):
            note(f"note: {trace} is cut off; replayed is what came before the cut")
        if plot:
            plot.write_text(replay_report.chart(source, results), encoding="utf-8")
        if as_json:
            reports.append(replay_report.to_json(source, results))
        else:
            click.echo(printable(replay_report.table(source, results)))
    if as_json:
        click.echo(json.dumps(reports, indent=2))


@command.command("import")
@click.argument("routes", metavar="ROUTES.csv[.gz]")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Where to write.")
def import_routes(routes: str, out: Path) -> None:
    """Turn the traces of a CSV into Strata's compact format, a file each.

    \b
    Example:
      strata trace import decode_routes.csv.gz --out traces
    """
    from strata.interfaces.terminal import printable
    from strata.memory.routes_csv import read_routes
    from strata.memory.trace import TraceWriter

    out.mkdir(parents=True, exist_ok=True)
    for name, source in read_routes(Path(routes)).items():
        path = out / f"{_file_name(name)}.trace"
        with TraceWriter(path, source.header) as writer:
            for access in source:
                writer.add(access)
        click.echo(printable(f"{path}: {len(source.accesses)} accesses, {path.stat().st_size} bytes"))


def _policies(text: str) -> list[str]:
    from strata.memory.policies import POLICIES

    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in (*POLICIES, "belady")]
    if unknown:
        raise UsageError(f"no policy is called {unknown[0]!r}", remedy=f"choose from {', '.join(POLICIES)}")
    return [name for name in dict.fromkeys(names) if name in POLICIES]


def _count(part: str, source: TraceSource) -> int:
    """Slots as a number. UsageError for more than the trace's model has experts."""
    total = source.header.space.total
    count = int(part.removesuffix("%")) * total // 100 if part.endswith("%") else int(part)
    if count > total:
        raise UsageError(
            f"--slots {count}, {source.header.model} has {total} experts",
            remedy=f"choose up to {total}, or a share such as 50%",
        )
    return count


def _file_name(name: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return safe.strip(".")[:200] or "trace"
