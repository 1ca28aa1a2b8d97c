"""The options of commands that record what they do."""

from __future__ import annotations

from pathlib import Path

import click

timeline_option = click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="What ran when, for ui.perfetto.dev.",
)
record_trace_option = click.option(
    "--record-trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record which experts were used, for strata trace.",
)
