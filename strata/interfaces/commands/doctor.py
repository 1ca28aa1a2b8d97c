"""`strata doctor`: what this machine has, as Strata sees it."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(as_json: bool) -> None:
    """Show what Strata finds on this machine.

    Processor, NUMA nodes, memory, huge pages, bandwidth. Exits with 1 when something needed is missing.

    \b
    Example:
      strata doctor
    """
    from strata.interfaces.machine import examine

    machine = examine()
    click.echo(json.dumps(machine, indent=2) if as_json else _describe(machine))
    if machine["problem"]:
        raise click.exceptions.Exit(1)


def _describe(machine: dict[str, Any]) -> str:
    from strata.config import format_size

    pages = ", ".join(
        f"{page['total']} of {format_size(page['bytes'])} ({page['free']} free)"
        for page in machine["huge_pages"]
    )
    nodes = "; ".join(
        f"node {node['index']}: CPUs {node['cpus'] or 'none'}" for node in machine["numa_nodes"]
    )
    bandwidth = machine["bandwidth"]
    lines = [
        f"processor    {machine['processor']}, kernels: {machine['isa'] or 'none'}",
        f"threads      {machine['threads']}; allowed CPUs {machine['allowed_cpus']}",
        f"NUMA         {nodes}",
        f"memory       {format_size(machine['memory'])}, free: {format_size(machine['available'])}",
        f"huge pages   {pages or 'none reserved'}; transparent: {machine['transparent_huge_pages']}",
        f"bandwidth    {bandwidth / 1e9:.1f} GB/s reading memory, measured now"
        if bandwidth
        else "bandwidth    unknown",
        *(f"note         {warning}" for warning in machine["warnings"]),
    ]
    if machine["problem"]:
        lines.append(f"problem      {machine['problem']}")
    return "\n".join(lines)
