"""`strata bench`: tokens per second beside the limits of memory and processor, measured around each run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from strata.config import Config, Override, load_config
from strata.errors import UsageError
from strata.interfaces.commands.effects import refuse_idle
from strata.interfaces.commands.recording_options import timeline_option

_MAX_TOKENS, _MAX_STREAMS = 1 << 20, 64
_OF_ONE_KIND = {"--speculative": ("draft", "texts"), "--dry-launch": ("launch_us",)}
_USUAL = ("prompts", "depths", "seed", "ops", "no_warmup", "timeline", "as_csv")
_NOT_IN = {"--speculative": (*_USUAL, "streams"), "--dry-launch": (*_USUAL, "generate", "repetitions")}


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Whole numbers, comma-separated: "1,4,16"."""

    name = "numbers"

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers in the order given; fails for anything else, and outside of low to high."""
        parts = value.split(",") if isinstance(value, str) else [str(number) for number in value]
        plain = [part.strip() for part in parts if part.isascii()]
        found = [int(part) for part in plain if part.isdecimal() and len(part) < 10]
        if len(found) < len(parts) or not all(self.low <= number <= self.high for number in found):
            self.fail(f"{value!r}: numbers from {self.low} to {self.high}, comma-separated", param, ctx)
        return list(dict.fromkeys(found))


@click.command("bench")
@click.argument("positional", required=False, metavar="[STORE|demo]")
@click.option("-m", "--model", metavar="PATH", help="The same, as llama-bench has it.")
@click.option("--config", "config_file", metavar="FILE", help="Configuration, see configs/default.yaml.")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@click.option("-t", "--threads", metavar="N", help="Threads that compute.")
@click.option(
    "-p", "--n-prompt", "prompts", type=Numbers(0, _MAX_TOKENS), default="512", help="Prompt [512]."
)
@click.option(
    "-n", "--n-gen", "generate", type=Numbers(0, _MAX_TOKENS), default="128", help="Generate [128]."
)
@click.option(
    "-d", "--n-depth", "depths", type=Numbers(0, _MAX_TOKENS), default="0", help="Tokens before [0]."
)
@click.option("-s", "--streams", type=Numbers(1, _MAX_STREAMS), default="1", help="At the same time [1].")
@click.option(
    "-r", "--repetitions", type=click.IntRange(1, 1000), metavar="N", default=3, help="Runs of each test [3]."
)
@click.option("--seed", type=click.IntRange(0), metavar="N", default=0, help="Of the random tokens.")
@click.option("--ops", is_flag=True, help="Time every op instead, by shape.")
@click.option("--dry-launch", is_flag=True, help="Count a step's kernel launches instead; needs no card.")
@click.option(
    "--launch-us",
    type=click.FloatRange(0, 1e6),
    metavar="X",
    default=4.0,
    help="Cost of a launch [4], for it.",
)
@click.option("--speculative", is_flag=True, help="Plain decoding beside drafts: fixed, dynamic, cost-aware.")
@click.option("-md", "--model-draft", "--draft-model", "draft", metavar="PATH", help="What proposes, for it.")
@click.option("--texts", metavar="NAMES", help="For it: some of code, json, prose, repeat, misleading.")
@click.option("--no-warmup", is_flag=True, help="Count the first touch of the weights, too.")
@timeline_option
@click.option("--csv", "as_csv", is_flag=True, help="CSV instead of a Markdown table.")
@click.option("--json", "as_json", is_flag=True, help="JSON with every single run.")
def command(
    positional: str | None,
    model: str | None,
    config_file: str | None,
    settings: tuple[str, ...],
    threads: str | None,
    prompts: list[int],
    generate: list[int],
    depths: list[int],
    streams: list[int],
    repetitions: int,
    seed: int,
    ops: bool,
    dry_launch: bool,
    launch_us: float,
    speculative: bool,
    draft: str | None,
    texts: str | None,
    no_warmup: bool,
    timeline: Path | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Measure prefill and decoding, at depth and in several streams.

    Without options as llama-bench: a prompt of 512 tokens, and 128 generated. Options take comma-separated
    numbers, as llama-bench's do. Every -n runs at each depth, and with each number of streams at the first
    depth. Speeds are medians with minimum and maximum. GB/s: weights and KV
    read; memory: what the same threads read just before and after each run. GMAC/s: multiply-adds of the
    weight matrices; int8 peak: what the same threads can do at most, measured just as well.

    Tokens differ between streams: with the same one in all, they would use the same experts and look cheap.

    --speculative decodes -n tokens of several texts without drafts, with drafts of 4 and of 8 tokens, by
    the rule of recent acceptance ("dynamic"), and cut to what pays ("cost-aware"), in -r rounds after one
    that does not count; n-grams propose, or the model of -md, which n-grams replace where it does not pay
    ("proposed by"). In a round all decode the same tokens in turns, some ms at a time, so that what else
    the machine does meets all alike. "of plain" compares their time in all rounds, with its standard
    error and the least and most of one (spread),
    "undisturbed" the same without what some steps took longer than others of as many rows. "slowest 64"
    compares the slowest 64 steps in a row with plain decoding's time for the same tokens. How far "plain
    again" is from 1 is what is left of the machine's noise.

    --dry-launch computes nothing: it counts what decoding steps ask of a card's driver, per layer and step.

    \b
    Examples:
      strata bench demo -d 0,256
      strata bench demo --dry-launch -s 1,4
      strata bench stores/qwen3-30b -p 512,2048 -n 64 -d 0,4096 -s 1,4,16 --csv
      strata bench stores/qwen3-30b --ops -p 0 -n 32 -s 1
      strata bench demo --speculative -md demo-draft -n 256
    """
    form = _form(as_csv, as_json)
    kind = _kind(speculative, dry_launch)
    _refuse_idle(kind)
    if math.isnan(launch_us):
        raise UsageError("--launch-us is no number", remedy="microseconds, e.g. 4")
    config = _config(config_file, settings, _one_model(positional, model), threads, draft)
    if speculative:
        _compare_drafts(
            config, _one_length(generate), repetitions, texts.split(",") if texts is not None else [], as_json
        )
        return
    if dry_launch:
        _count_launches(config, streams, launch_us / 1e6, as_json)
        return
    from strata.interfaces.benchmark import Benchmark

    cases = _cases(prompts, generate, depths, streams)
    _measure(Benchmark(config, cases, ops=ops, seed=seed), form, repetitions, not no_warmup, timeline)


def _form(as_csv: bool, as_json: bool) -> str:
    if as_csv and as_json:
        raise UsageError("--csv and --json were both given", remedy="choose one")
    return "csv" if as_csv else "json" if as_json else "md"


def _kind(speculative: bool, dry_launch: bool) -> str:
    """The flag that asks for another kind of benchmark, or ""."""
    if speculative and dry_launch:
        raise UsageError("--speculative and --dry-launch were both given", remedy="choose one")
    return "--speculative" if speculative else "--dry-launch" if dry_launch else ""


def _refuse_idle(kind: str) -> None:
    """UsageError for options that belong to another kind of benchmark."""
    for owner, names in _OF_ONE_KIND.items():
        if kind != owner:
            refuse_idle(names, f"has an effect with {owner} only", "add it, or leave the option out")
    if kind:
        refuse_idle(_NOT_IN[kind], f"has no effect with {kind}", "leave one of them out")


def _one_length(generate: list[int]) -> int:
    if len(generate) > 1:
        numbers = ",".join(map(str, generate))
        raise UsageError(f"--n-gen {numbers}: --speculative takes one number", remedy="e.g. -n 256")
    return generate[0]


def _one_model(positional: str | None, model: str | None) -> str | None:
    if positional is not None and model is not None:
        raise UsageError(f"two models: {positional} and --model {model}", remedy="name one")
    return model if positional is None else positional


def _config(
    file: str | None, settings: tuple[str, ...], model: str | None, threads: str | None, draft: str | None
) -> Config:
    overrides = [Override.parse(item) for item in settings]
    overrides += [Override("model.path", model, "MODEL")] if model is not None else []
    overrides += [Override("backend.threads", threads, "--threads")] if threads is not None else []
    overrides += [Override("speculative.draft", draft, "--model-draft")] if draft is not None else []
    config = load_config(file, overrides)
    if not config.model.path:
        raise UsageError("no model is given", remedy="strata bench demo, or a store's path")
    return config


def _cases(prompts: list[int], generate: list[int], depths: list[int], streams: list[int]) -> list[Any]:
    from strata.engine.bench.figures import plan_cases

    cases = plan_cases(prompts, generate, depths, streams)
    if not cases:
        raise UsageError("nothing to measure: -p and -n are 0", remedy="e.g. -p 512 -n 128")
    return cases


def _compare_drafts(config: Any, tokens: int, repeats: int, texts: list[str], as_json: bool) -> None:
    import json

    from strata.interfaces import speculative_bench
    from strata.interfaces.start import announce
    from strata.interfaces.terminal import printable

    if tokens < 2:
        raise UsageError(f"-n is {tokens}: nothing to compare", remedy="e.g. -n 256")
    bench = speculative_bench.SpeculativeBenchmark(config, tokens, texts)
    if as_json:
        found = speculative_bench.to_json(bench, list(bench.results(repeats)))
        click.echo(json.dumps(found, indent=2))
        return
    announce(bench.plan, bench.machine, bench.kv_place)
    by = f"{bench.proposer} ({bench.plan.draft.model})" if bench.plan.draft else bench.proposer
    click.echo(printable(f"{bench.model}, drafts by {by}\n\n{speculative_bench.markdown_head()}"))
    for runs in bench.results(repeats):
        for line in speculative_bench.markdown_lines(runs):
            click.echo(printable(line))
    click.echo(f"\n{speculative_bench.remark(repeats, bench.alone)}")


def _count_launches(config: Any, streams: list[int], launch_seconds: float, as_json: bool) -> None:
    import json

    from strata.interfaces import dry_launching
    from strata.interfaces.terminal import printable

    found = dry_launching.count(config, streams)
    if as_json:
        records = [dry_launching.to_json(*pair, launch_seconds) for pair in found]
        click.echo(json.dumps(records, indent=2))
        return
    for pair in found:
        click.echo(printable(dry_launching.describe(*pair, launch_seconds)))


def _measure(bench: Any, form: str, repetitions: int, warm: bool, timeline: Path | None) -> None:
    _introduce(bench, form)
    if warm:
        bench.warm_up()
    with bench.recording(timeline):
        _report(bench, repetitions, form)


def _introduce(bench: Any, form: str) -> None:
    from strata.interfaces.start import announce
    from strata.interfaces.terminal import note

    if form == "md":
        announce(bench.plan, bench.machine, bench.kv_place)
    for case in bench.left_out:
        note(f"note: {case.label} is left out: the model's context is {bench.context} tokens")


def _report(bench: Any, repetitions: int, form: str) -> None:
    """Markdown lines appear as they are measured, CSV and JSON at the end."""
    import json

    from strata.interfaces import bench_report
    from strata.interfaces.terminal import printable

    results = bench.results(repetitions)
    if form == "csv":
        click.echo(printable(bench_report.to_csv(bench.subject, list(results))), nl=False)
    elif form == "json":
        click.echo(json.dumps(bench_report.to_json(bench.subject, list(results)), indent=2))
    else:
        _print_markdown(bench, results)


def _print_markdown(bench: Any, results: Any) -> None:
    from strata.interfaces import bench_report
    from strata.interfaces.terminal import printable

    for number, result in enumerate(results):
        timed = any(run.ops for run in result.runs)
        if number == 0 and not timed:
            click.echo(printable(bench_report.markdown_head(bench.subject)))
        text = (
            bench_report.markdown_ops(result) if timed else bench_report.markdown_line(bench.subject, result)
        )
        click.echo(printable(text))
