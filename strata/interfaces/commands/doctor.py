"""`strata doctor`: what this machine has, as Strata sees it."""

from __future__ import annotations

import json

import click


@click.command("doctor")
@click.option("--measure", is_flag=True, help="Measure the speeds again; they are remembered per machine.")
@click.option("--hardware", metavar="NAME|FILE", help="Show a hardware profile instead of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(measure: bool, hardware: str | None, as_json: bool) -> None:
    """Show what Strata finds on this machine.

    Processor, NUMA nodes, memory and its limits, huge pages, graphics card and its link, speeds. The first
    time, speeds are measured, which takes two seconds. Of a graphics card it says what is missing for it and
    the command that brings that; --measure copies over its link. Exits with 1 when something is missing that
    every run needs.

    \b
    Examples:
      strata doctor --measure
      strata doctor --hardware rtx3090-2x-e5-2680v4
    """
    from strata.errors import UsageError
    from strata.interfaces.machine import describe, examine
    from strata.interfaces.terminal import printable

    if measure and hardware:
        raise UsageError("--measure and --hardware were both given", remedy="a profile states its speeds")
    found, facts = examine(hardware, again=measure)
    click.echo(json.dumps(facts, indent=2) if as_json else printable(describe(found, facts)))
    if facts["problem"]:
        raise click.exceptions.Exit(1)
