"""`strata service`: a systemd unit for `strata serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from strata.errors import UsageError

if TYPE_CHECKING:  # commands import what is heavy when they run
    from strata.interfaces.systemd.installation import Installation


@click.group("service", short_help="Run the server as a systemd service.")
def command() -> None:
    """Run the server as a systemd service: restarted when it fails or when tokens stop coming.

    \b
    Examples:
      strata service install --config server.yaml --user --print
      sudo strata service install --config /etc/strata.yaml --run-as strata --now
      strata service install --config server.yaml --user --now
    """


def _which(function: Callable[..., Any]) -> Callable[..., Any]:
    own = click.option("--user", "own", is_flag=True, help="In your own service manager, without root.")
    name = click.option("--name", default="strata", metavar="NAME", help="The service's name [strata].")
    return own(name(function))


@command.command("install")
@click.option("--config", "config_file", required=True, metavar="FILE", help="What to serve, and how.")
@_which
@click.option("--run-as", "account", metavar="NAME", help="Account of a system service [who called sudo].")
@click.option("--now", is_flag=True, help="Start it, now and at every boot.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit and change nothing.")
def install(config_file: str, own: bool, name: str, account: str | None, now: bool, only_print: bool) -> None:
    """Write the unit for a configuration: memory nodes from its plan, limits, restarts, confinement.

    \b
    Example:
      strata service install --config configs/demo.yaml --user --print
    """
    from strata.interfaces.systemd.installation import Installation

    if only_print and now:
        raise UsageError("--print changes nothing, --now starts the service", remedy="leave one of them out")
    installation = Installation(name, own)
    text = _unit(config_file, own, account)
    if only_print:
        click.echo(text, nl=False)
        return
    installation.write(text)
    click.echo(f"wrote {installation.file}")
    if installation.control("daemon-reload") is None:
        click.echo("no systemd runs here: nothing was started")
        return
    if now:
        installation.control("enable", installation.unit)
        installation.control("restart", installation.unit)
        click.echo(f"{installation.unit} runs; its log: {_journal(installation)}")
    else:
        manager = "systemctl --user" if own else "systemctl"
        click.echo(f"start it, now and at every boot: {manager} enable --now {installation.unit}")


@command.command("status")
@_which
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def status(own: bool, name: str, as_json: bool) -> int:
    """Say whether the service runs and what it serves; the exit code is 0 only if it does.

    \b
    Example:
      strata service status --user
    """
    from strata.interfaces.systemd.installation import Installation

    installation = Installation(name, own)
    installed = installation.file.exists()
    state = installation.state() if installed else None
    if as_json:
        click.echo(json.dumps({"unit": str(installation.file), "installed": installed, "state": state}))
    else:
        click.echo(_described(installation, installed, state))
    return 0 if state is not None and state.get("ActiveState") == "active" else 1


@command.command("uninstall")
@_which
def uninstall(own: bool, name: str) -> None:
    """Stop the service and remove its unit. Models and caches stay.

    \b
    Example:
      strata service uninstall --user
    """
    from strata.interfaces.systemd.installation import Installation

    installation = Installation(name, own)
    installation.require_installed()
    installation.control("disable", "--now", installation.unit)
    installation.remove()
    installation.control("daemon-reload")
    click.echo(f"removed {installation.file}")


def _unit(config_file: str, own: bool, account: str | None) -> str:
    from strata.interfaces.commands.serve import serving_config
    from strata.interfaces.hardware import remembered_machine, with_device
    from strata.interfaces.planning import plan_model
    from strata.interfaces.systemd.describe import describe, service_user
    from strata.interfaces.systemd.unit import unit_text

    if own and account:
        raise UsageError("--user and --run-as exclude each other", remedy="leave one out")
    user = "" if own else service_user(account)
    config = serving_config(config_file, [])
    if not config.model.path:
        raise UsageError(f"{config_file} names no model", remedy="model: path: ...")
    machine = with_device(remembered_machine(), config)
    return unit_text(describe(config, plan_model(config, machine), machine, user))


def _described(installation: Installation, installed: bool, state: dict[str, str] | None) -> str:
    if not installed:
        return f"not installed: there is no {installation.file}"
    if state is None:
        return f"installed as {installation.file}; no systemd runs here"
    lines = [f"{installation.unit}: {state.get('ActiveState')} ({state.get('SubState')})"]
    lines += [f"  {state['StatusText']}"] if state.get("StatusText") else []
    lines.append(f"  process {state.get('MainPID')}, restarted {state.get('NRestarts')} times")
    return "\n".join([*lines, f"  log: {_journal(installation)}"])


def _journal(installation: Installation) -> str:
    return f"journalctl {'--user ' if installation.own else ''}-u {installation.unit}"
