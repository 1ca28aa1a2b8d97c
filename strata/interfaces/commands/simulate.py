"""`strata simulate`: a served workload on a machine that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import click

from strata.config import Config, Override, load_config
from strata.errors import UsageError
from strata.interfaces.commands.bench import Numbers
from strata.interfaces.commands.effects import given, refuse_idle

_MAX_TOKENS, _MAX_REQUESTS = 1 << 17, 64
_ROUNDS = ("rounds", "hardware", "seed", "as_json", "debug")


@click.command("simulate")
@click.argument("positional", required=False, metavar="[MODEL]")
@click.option("-m", "--model", metavar="PATH", help="A config.json, GGUF header, checkpoint or store.")
@click.option("--config", "config_file", metavar="FILE", help="Configuration, see configs/default.yaml.")
@click.option("--hardware", metavar="NAME|FILE", help="Another machine; `strata doctor` shows one.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Routes of a recorded trace.")
@click.option(
    "--only", metavar="NAME", help="Of a CSV with several traces, the one whose name has NAME in it."
)
@click.option(
    "--requests", type=Numbers(1, _MAX_REQUESTS), default="1,4,16", help="At the same time. [1,4,16]"
)
@click.option(
    "--prompt",
    type=click.IntRange(1, _MAX_TOKENS),
    metavar="N",
    default=512,
    help="Tokens of a prompt. [512]",
)
@click.option(
    "--answer", type=click.IntRange(2, _MAX_TOKENS), metavar="N", default=64, help="Tokens of an answer. [64]"
)
@click.option(
    "--policy", default="lru", metavar="NAME", help="Of the expert cache: lru, lfu, forecast. [lru]"
)
@click.option("--seed", type=click.IntRange(0), metavar="N", default=0, help="Of made-up routes.")
@click.option("--rounds", is_flag=True, help="Rebuild the three rounds of the 125B field report instead.")
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Of the first number of requests.",
)
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(
    positional: str | None,
    model: str | None,
    config_file: str | None,
    hardware: str | None,
    trace: Path | None,
    only: str | None,
    requests: list[int],
    prompt: int,
    answer: int,
    policy: str,
    seed: int,
    rounds: bool,
    timeline: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict the speed of a served workload, step by step.

    The expert cache and its policy are the real ones; seconds come from the planner's cost model. Requests
    follow each other, so that as many run at all times; a warm-up is not counted. tokens/s: of answers, with
    the prompts' time in it; decode: the steps' decoding alone; by the plan: what `strata plan` predicts for
    that. Without --trace the routes are made up, by a model that was fitted to published hit rates.
    Headers suffice, as for `strata plan`.

    \b
    Examples:
      strata simulate --model GLM-4.5-Air/config.json --hardware rtx3090-2x-e5-2680v4
      strata simulate Mixtral-8x7B/config.json --trace decode_routes.csv.gz --only mixtral
      strata simulate --rounds
    """
    if rounds:
        _rounds(hardware, seed, as_json)
        return
    if positional is not None and model is not None:
        raise UsageError(f"two models: {positional} and --model {model}", remedy="name one")
    overrides = [Override.parse(item) for item in settings]
    path = model if positional is None else positional
    overrides += [Override("model.path", path, "MODEL")] if path is not None else []
    config = load_config(config_file, overrides)
    if not config.model.path:
        raise UsageError("no model is given", remedy="strata simulate demo, or the path of a config.json")
    from strata.interfaces.simulation import Workload

    if trace is None:
        refuse_idle(("only",), "chooses among the traces of --trace", "add --trace, or leave it out")
    else:
        refuse_idle(("seed",), "is of made-up routes, not of a recorded trace", "leave one of them out")
    _check_policy(policy)
    work = Workload(requests, prompt, answer, policy, trace, only, seed)
    _simulate(config, hardware, work, timeline, as_json)


def _refuse_beside_rounds() -> None:
    """What was given and would have no effect is an error."""
    for name, word in given():
        if name not in _ROUNDS:
            raise UsageError(
                f"--rounds has a model and a workload of its own: leave {word} out",
                remedy="--hardware, --seed and --json go with it",
            )


def _check_policy(policy: str) -> None:
    from strata.memory.policies import POLICIES

    if policy not in POLICIES:
        raise UsageError(f"no policy is called {policy!r}", remedy=f"choose from {', '.join(POLICIES)}")


def _simulate(
    config: Config, hardware: str | None, work: object, timeline: Path | None, as_json: bool
) -> None:
    from strata.interfaces import simulate_report
    from strata.interfaces.hardware import hardware as find_hardware
    from strata.interfaces.simulation import Workload, simulate
    from strata.interfaces.terminal import printable

    assert isinstance(work, Workload)
    machine = find_hardware(hardware)
    found = list(simulate(config, machine, work, timeline))
    if as_json:
        click.echo(json.dumps(simulate_report.to_json(found, work), indent=2))
    else:
        click.echo(printable(simulate_report.report(found, machine, work)))


def _rounds(hardware: str | None, seed: int, as_json: bool) -> None:
    _refuse_beside_rounds()
    from strata.engine.simulate.rounds import PROFILE, rebuild
    from strata.engine.simulate.rounds_words import explain
    from strata.errors import HardwareError
    from strata.hardware.profile_file import load_profile
    from strata.interfaces import simulate_report

    machine = load_profile(hardware or PROFILE)
    if machine.device is None:
        raise HardwareError(f"{machine.name} has no graphics card", remedy=f"--hardware {PROFILE}")
    found = rebuild(machine, seed)
    words = explain(found, machine)
    if as_json:
        click.echo(json.dumps(simulate_report.rounds_json(found, words), indent=2))
    else:
        click.echo(simulate_report.rounds_report(found, words, machine))
