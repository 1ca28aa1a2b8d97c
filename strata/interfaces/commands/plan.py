"""`strata plan`: what fits where and how fast it will be, before anything is downloaded or converted."""

from __future__ import annotations

import json
import shutil
import sys

import click

from strata.config import Override, load_config
from strata.errors import UsageError
from strata.interfaces.commands.speculation_flags import DRAFTERS


@click.command("plan", short_help="Say what will lie where, and how fast it will be.")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--config", "config_file", metavar="FILE", help="Configuration, see configs/default.yaml.")
@click.option("--hardware", metavar="NAME|FILE", help="Plan for another machine; `strata doctor` shows one.")
@click.option("-c", "--context", metavar="N", help="Tokens of prompt and answer together.")
@click.option("--requests", metavar="N", help="Requests that may be that long at the same time.")
@click.option(
    "--depth", type=click.IntRange(0), metavar="N", help="Tokens of context for predictions [4096]."
)
@click.option(*DRAFTERS, "draft", metavar="PATH", help="Small model that proposes, or MTP layer.")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(
    model: str | None,
    config_file: str | None,
    hardware: str | None,
    context: str | None,
    requests: str | None,
    depth: int | None,
    draft: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what will lie where, how fast it will be, and what would be faster.

    MODEL is a store, a checkpoint, a GGUF file, or nothing but a config.json or the beginning of a GGUF file:
    headers suffice. Without --hardware the plan is for this machine, whose memory speed is measured the
    first time. Exits with 1 when it does not fit, with both numbers and what to do.

    \b
    Examples:
      strata plan Qwen3-30B-A3B/config.json --hardware rtx3090-2x-e5-2680v4
      strata plan demo -md demo-draft
      strata plan --config configs/infer_3090.yaml models/GLM-4.5-Air --context 32768 --requests 4
    """
    overrides = [Override.parse(item) for item in settings]
    for option, text, origin in (
        ("model.path", model, "MODEL"),
        ("model.context", context, "--context"),
        ("engine.requests", requests, "--requests"),
        ("speculative.draft", draft, "--model-draft"),
    ):
        overrides += [Override(option, text, origin)] if text is not None else []
    config = load_config(config_file, overrides)
    if not config.model.path:
        raise UsageError("no model is given", remedy="strata plan demo, or the path of a config.json")
    from strata.interfaces.hardware import hardware as find_hardware
    from strata.interfaces.plan_report import report
    from strata.interfaces.planning import plan_model
    from strata.interfaces.terminal import note, styled

    machine = find_hardware(hardware)
    plan = plan_model(config, machine, depth)
    if depth is not None and depth >= plan.kv.context:
        raise UsageError(
            f"--depth is {depth}, the context holds {plan.kv.context} tokens with the next one",
            remedy="a smaller --depth, or a larger --context",
        )
    if config.device.use == "cuda" and machine.device is None:
        where = config.where("device.use")
        note(f"note: device.use is cuda ({where}), but {_whose(hardware)} has no card: planned without one")
    if as_json:
        click.echo(json.dumps({**plan.to_json(), "hardware": machine.to_json()}, indent=2))
    else:
        terminal = styled(sys.stdout)
        width = shutil.get_terminal_size().columns if terminal else None
        click.echo(report(plan, machine, width=width, styled=terminal))


def _whose(hardware: str | None) -> str:
    return "this machine" if hardware is None else hardware
