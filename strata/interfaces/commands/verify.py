"""`strata verify`: every checksum of a store."""

from __future__ import annotations

import json

import click

from strata.errors import StoreError


@click.command("verify")
@click.argument("store", metavar="STORE|demo")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(store: str, as_json: bool) -> None:
    """Read a whole store: checksums, headers, padding. Exits with 1 when anything is wrong.

    \b
    Example:
      strata verify stores/qwen3-30b
    """
    from strata.config import format_size
    from strata.interfaces.bundled import model_path
    from strata.interfaces.progress import progress_bar
    from strata.interfaces.terminal import printable
    from strata.store.verify import verify_store

    with progress_bar("verifying") as progress:
        report = verify_store(model_path(store), progress)
    if as_json:
        click.echo(json.dumps({"path": store, **vars(report)}, indent=2))
    elif not report.problems:
        click.echo(printable(f"{store}: {report.files} files, {format_size(report.bytes)}: all sound"))
    if report.problems:
        raise StoreError(
            f"{store}: {len(report.problems)} of {report.files} files are damaged:\n  "
            + "\n  ".join(report.problems),
            remedy="convert the model again with --force",
        )
