"""`strata convert`: a checkpoint becomes a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.errors import UsageError
from strata.interfaces.commands.effects import refuse_idle

if TYPE_CHECKING:  # commands import what is heavy when they run
    from strata.interfaces.importing import Refine
    from strata.store.convert import ConvertReport
    from strata.store.options import ConvertOptions

_FORMAT = "FORMAT"
_GRID = "perplexity"


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.option("--out", required=True, metavar="STORE", help="Folder of the store; must not exist yet.")
@click.option("--experts", default="auto", metavar=_FORMAT, help="Routed experts.")
@click.option("--shared", default="auto", metavar=_FORMAT, help="Attention, dense layers, shared experts.")
@click.option("--head", default="auto", metavar=_FORMAT, help="Output matrix.")
@click.option("--embed", default="auto", metavar=_FORMAT, help="Token embedding.")
@click.option("--slices", type=int, metavar="N", help="Parts an expert is cut into, one per memory node.")
@click.option(
    "--layer-format",
    "layers",
    multiple=True,
    metavar="PART.LAYERS=FORMAT",
    help="E.g. experts.0-3=bf16, mlp.down.5=w8.",
)
@click.option(
    "--method",
    metavar="METHOD",
    help="plain, gptq, awq, smooth, awq+gptq, smooth+gptq; experts=gptq,shared=plain.",
)
@click.option("--stats", metavar="STATS", help="What `strata calibrate` found; for --method and --budget.")
@click.option("--act-order/--no-act-order", default=True, help="gptq: largest inputs first (default).")
@click.option(
    "--alpha", metavar="A", help="awq, smooth: 0 to 1, or perplexity: the best of a grid. [per place]"
)
@click.option(
    "--data", multiple=True, metavar="FILE", help="Text for --alpha perplexity. [calibrate's mixture]"
)
@click.option("--clip", type=float, metavar="PERCENT", help="w8: cut rows off above this percentile: 99.9.")
@click.option("--budget", metavar="SIZE", help="E.g. 60GiB: choose the formats of auto parts by STATS.")
@click.option("--further", is_flag=True, help="Only the layer that predicts further tokens (MTP).")
@click.option("--requantize", is_flag=True, help="With auto: do not keep the source's own quantization.")
@click.option("--allow-nan", is_flag=True, help="Store NaN and Inf as 0 and count them.")
@click.option("--force", is_flag=True, help="Replace an existing store, once the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable report.")
def command(
    source: str,
    out: str,
    experts: str,
    shared: str,
    head: str,
    embed: str,
    slices: int | None,
    layers: tuple[str, ...],
    method: str | None,
    stats: str | None,
    act_order: bool,
    alpha: str | None,
    data: tuple[str, ...],
    clip: float | None,
    budget: str | None,
    further: bool,
    requantize: bool,
    allow_nan: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a GGUF file or a Hugging Face directory into a store.

    It can be stopped at any moment: the same command continues. Formats: bf16 f16 w8 w8g32 w4g32 w4g64
    w4g128 w4g32m w4g64m w4g128m mxfp4; auto keeps the source's own quantization where a format holds it
    without loss, else takes w4g64 for experts, w4g128 for shared layers, w8 for head and embedding.
    --budget spends that many bytes where they take most error away, layer by layer (docs/quantization.md).

    \b
    Examples:
      strata convert models/Qwen3-30B-A3B --out stores/qwen3-30b
      strata convert model.gguf --out stores/model --experts w4g64 --shared w4g128 --head w8
      strata convert models/Qwen3-30B-A3B --out stores/best --budget 20GiB --stats qwen3.stats
      strata convert models/GLM-4.5-Air --further --out stores/glm-4.5-air-mtp
      strata convert models/Qwen3-30B-A3B --out stores/better --method gptq --stats qwen3.stats
      strata convert SRC --out stores/w8a8 --experts w8 --method smooth --alpha perplexity --stats STATS
      strata convert models/Qwen3-30B-A3B --out stores/careful --experts bf16 --shared w4g128
    """
    from strata.store.methods import parse_methods
    from strata.store.options import ConvertOptions

    options = ConvertOptions(
        experts=experts,
        shared=shared,
        head=head,
        embed=embed,
        slices=ConvertOptions.slices if slices is None else slices,
        allow_nan=allow_nan,
        keep_quantized=not requantize,
        overrides=_layer_formats(layers),
        methods=parse_methods(method) if method is not None else {},
        act_order=act_order,
        alpha=None if alpha == _GRID else _number(alpha),
        clip=clip,
        force=force,
    )
    _refuse_idle(options, requantize, budget)
    if data and alpha != _GRID:
        raise UsageError(f"--data has an effect with --alpha {_GRID} only", remedy="add it, or leave it out")
    if alpha == _GRID:
        report = _convert_best(source, Path(out), options, stats, data, alone=budget is None and not further)
    else:
        report = _convert(source, Path(out), options, budget, stats, further)
    if as_json:
        click.echo(json.dumps({**vars(report), "path": str(report.path)}, indent=2))
    else:
        _print(report, out)


def _refuse_idle(options: ConvertOptions, requantize: bool, budget: str | None) -> None:
    """UsageError for what would change nothing; what ConvertOptions can tell, it says itself."""
    from strata.store.options import AUTO, DEFAULT_FORMATS

    if not options.factored:
        refuse_idle(("act_order",), "is of the method gptq", "add --method gptq, or leave it out")
    if requantize and budget is None and all(getattr(options, part) != AUTO for part in DEFAULT_FORMATS):
        formats = ", ".join(f"{part}={getattr(options, part)}" for part in DEFAULT_FORMATS)
        raise UsageError(
            f"--requantize is for parts in auto, and there are none: {formats}", remedy="leave it out"
        )


def _convert(
    source: str, out: Path, options: ConvertOptions, budget: str | None, stats: str | None, further: bool
) -> ConvertReport:
    from strata.interfaces.bundled import model_path
    from strata.interfaces.importing import import_checkpoint
    from strata.interfaces.progress import progress_bar
    from strata.interfaces.terminal import note
    from strata.store.calibration import CalibrationStats

    refine = _within(budget, stats) if budget is not None else None
    try:
        with progress_bar("converting") as progress:
            used = options.calibrated or budget is None
            found = CalibrationStats(Path(stats)) if stats is not None and used else None
            return import_checkpoint(model_path(source), out, options, progress, refine, further, found)
    except KeyboardInterrupt:
        note("stopped; the same command continues")
        raise


def _number(alpha: str | None) -> float | None:
    try:
        return None if alpha is None else float(alpha)
    except ValueError:
        raise UsageError(
            f"--alpha {alpha!r} is neither a number nor {_GRID}", remedy="e.g. --alpha 0.5"
        ) from None


def _convert_best(
    source: str, out: Path, options: ConvertOptions, stats: str | None, data: tuple[str, ...], *, alone: bool
) -> ConvertReport:
    """With the alpha of the least perplexity. alone: no other option wants to choose something as well."""
    from strata.interfaces.alpha_search import Search
    from strata.interfaces.bundled import model_path
    from strata.interfaces.calibration import default_texts, read_texts
    from strata.interfaces.terminal import note
    from strata.store.calibration import CalibrationStats

    if not alone or stats is None:
        raise UsageError(
            f"--alpha {_GRID} needs --stats, and goes neither with --budget nor with --further",
            remedy="make statistics with `strata calibrate SRC --out STATS`; name the formats yourself",
        )
    texts = read_texts([Path(name) for name in data]) if data else default_texts()
    search = Search(model_path(source), out, options, CalibrationStats(Path(stats)), texts)
    try:
        report = _convert(source, out, search.best(), None, stats, further=False)
    except KeyboardInterrupt:
        note("the same command goes on with the alphas that are left")
        raise
    search.forget()
    return report


def _within(budget: str, stats: str | None) -> Refine:
    from strata.config import parse_size
    from strata.interfaces.budgeting import within

    if stats is None:
        raise UsageError("--budget needs --stats", remedy="make them with `strata calibrate SRC --out STATS`")
    try:
        size = parse_size(budget)
    except ValueError as error:
        raise UsageError(f"--budget {budget!r} {error}", remedy="e.g. 60GiB") from None
    if size == 0:
        raise UsageError(f"--budget {budget} leaves no byte for a weight", remedy="e.g. 60GiB")
    return within(size, Path(stats), budget)


def _layer_formats(given: tuple[str, ...]) -> dict[str, str]:
    """experts.0-3=bf16 -> {"experts.0-3": "bf16"}; ConvertOptions checks both sides."""
    formats = {}
    for item in given:
        key, equals, name = item.partition("=")
        if not equals:
            raise UsageError(
                f"--layer-format {item!r} is not PART.LAYERS=FORMAT", remedy="e.g. experts.0-3=bf16"
            )
        formats[key] = name
    return formats


def _print(report: ConvertReport, out: str) -> None:
    from strata.config import format_size
    from strata.interfaces.terminal import note, printable

    for line in report.notes:
        note(f"note: {line}")
    for name, count in report.replaced.items():
        note(f"note: {name}: {count} values that were no numbers became 0")
    resumed = f", {report.resumed} of them from an earlier run" if report.resumed else ""
    click.echo(printable(f"{out}: {format_size(report.bytes)} on disk, {report.records} records{resumed}"))
