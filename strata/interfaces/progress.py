"""A progress bar on stderr, on terminals only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from strata.interfaces.terminal import printable, styled


@contextlib.contextmanager
def progress_bar(title: str, *, unit: str = "bytes") -> Iterator[Callable[[int, int, str], None] | None]:
    """Yields progress(done, in all, what), or None where nobody would see a bar. unit: of the numbers."""
    if not styled(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit))
    if unit == "bytes":
        counts = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (
        TextColumn(title),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, what="")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=printable(what)[:40])

        yield show
