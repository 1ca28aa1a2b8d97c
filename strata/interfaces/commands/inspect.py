"""`strata inspect`: parameters, experts, bytes and formats, from headers alone."""

from __future__ import annotations

import json

import click


@click.command("inspect")
@click.argument("path", metavar="SRC|STORE")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(path: str, as_json: bool) -> None:
    """Say what a model is: parameters, experts, bytes and formats.

    SRC is a GGUF file, a Hugging Face directory, or a bare config.json; STORE is what `strata convert` wrote;
    demo and smollm2 are known, too.

    \b
    Example:
      strata inspect models/Qwen3-30B-A3B --json
    """
    from strata.interfaces.bundled import model_path
    from strata.interfaces.inspection import describe, inspect_path
    from strata.interfaces.terminal import printable

    found = inspect_path(model_path(path))
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else printable(describe(found)))
