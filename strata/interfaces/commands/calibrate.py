"""`strata calibrate`: what a model's matrices read on a text, for quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # commands import what is heavy when they run
    from strata.engine.calibrate.run import CalibrationReport


@click.command("calibrate", short_help="Record what every matrix of a model reads.")
@click.argument("model", metavar="MODEL|demo")
@click.option("--data", multiple=True, metavar="FILE", help="Text; may be given several times. [a mixture]")
@click.option("--out", required=True, metavar="STATS", help="The file to write.")
@click.option("--tokens", type=click.IntRange(2), metavar="N", help="So many, evenly from all texts. [all]")
@click.option("--window", type=click.IntRange(2), metavar="N", help="Tokens that see each other. [1024]")
@click.option(
    "--min-tokens",
    type=click.IntRange(0, 1 << 40),
    metavar="N",
    default=256,
    help="Experts with fewer share. [256]",
)
@click.option("--no-moments", is_flag=True, help="Leave out what GPTQ needs: nearly all of the bytes.")
@click.option("-t", "--threads", type=click.IntRange(1), metavar="N", help="Threads that compute.")
@click.option("--force", is_flag=True, help="Replace STATS, or start an unfinished run over.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable report with every expert's tokens.")
def command(
    model: str,
    data: tuple[str, ...],
    out: str,
    tokens: int | None,
    window: int | None,
    min_tokens: int,
    no_moments: bool,
    threads: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Run texts through a model and record what every matrix reads: per expert, what the router sends it.

    MODEL is a store, a Hugging Face directory or a GGUF file. One layer is in memory at a time, and one
    expert of it; the hidden states of all tokens lie on the disk beside STATS meanwhile. It can be stopped
    at any moment: the same command continues with the first unfinished layer. Without --data it reads the
    mixture in the package (code, dialogue, prose, summaries, several languages): a text of one kind starves
    experts.

    `strata convert --stats` takes the checkpoint that a store was made of, never the store: name the
    checkpoint here as well.

    \b
    Examples:
      strata calibrate smollm2 --out smollm2.stats --tokens 20480
      strata calibrate models/Qwen3-30B-A3B --data mine.txt --data code.py --out qwen3.stats --tokens 131072
    """
    from strata.interfaces.bundled import model_path
    from strata.interfaces.calibration import CalibrateOptions, calibrate_model, default_texts, read_texts
    from strata.interfaces.progress import progress_bar
    from strata.interfaces.quality import rounded_formats
    from strata.interfaces.terminal import note

    options = CalibrateOptions(tokens, window, min_tokens, not no_moments, threads, force)
    texts = read_texts([Path(name) for name in data]) if data else default_texts()
    path = model_path(model)
    if rounded := rounded_formats(path):
        note(
            f"note: {model} is a store whose weights are rounded already ({rounded}): `strata convert` will "
            "need the checkpoint that it was made of"
        )
    try:
        with progress_bar("calibrating", unit="rows") as progress:
            report = calibrate_model(path, texts, Path(out), options, progress)
    except KeyboardInterrupt:
        note("stopped; the same command continues")
        raise
    if as_json:
        click.echo(json.dumps(_as_json(report, out), indent=2))
    else:
        _print(report, out)


def _as_json(report: CalibrationReport, out: str) -> dict[str, object]:
    from strata.store.calibration import CalibrationStats
    from strata.store.calibration_inputs import expert_input

    stats, spec = CalibrationStats(report.path), report.info.spec
    routed = [layer for layer in range(spec.layers) if spec.is_moe(layer)]
    return {
        "path": out,
        "bytes": report.bytes,
        "resumed": report.resumed,
        "tokens": report.info.tokens,
        "data": [vars(file) for file in report.info.data],
        "expert_tokens": {layer: stats.tokens(expert_input(layer, "gate_up")).tolist() for layer in routed},
        "starved": [[*expert, tokens] for expert, tokens in report.starved.items()],
    }


def _print(report: CalibrationReport, out: str) -> None:
    from strata.config import format_size
    from strata.interfaces.terminal import note, printable

    info = report.info
    for line in _starved(report):
        note(line)
    resumed = f", {report.resumed} of them from an earlier run" if report.resumed else ""
    size = format_size(report.bytes)
    click.echo(printable(f"{out}: {size}, {info.tokens} tokens, {info.spec.layers} layers{resumed}"))


def _starved(report: CalibrationReport) -> list[str]:
    """Who saw too few rows, a line per layer."""
    spec, found = report.info.spec, report.starved
    if not found or spec.experts is None:
        return []
    total = sum(spec.moe_layers) * spec.experts.router.experts
    lines = [
        f"note: {len(found)} of {total} experts saw fewer than {report.info.min_tokens} tokens; "
        "they get the shared statistics of their layer:"
    ]
    for layer in sorted({expert.layer for expert in found}):
        parts = [f"{expert.index} ({tokens})" for expert, tokens in found.items() if expert.layer == layer]
        lines.append(f"  layer {layer}: {', '.join(parts)}")
    return [*lines, "  more text (--data, --tokens) or a smaller --min-tokens gives them their own"]
