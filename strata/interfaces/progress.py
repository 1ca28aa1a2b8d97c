"""How far a long command is, on stderr: a bar on terminals, a line now and then in logs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from strata.config import format_size
from strata.interfaces.terminal import note, printable, styled

Progress = Callable[[int, int, str], None]
LINE_SECONDS = 10.0
"""Between two lines of a log; what is done earlier prints none."""
RECENT_SECONDS = 60.0
"""What the time that is left is judged by: the parts of a model take unequally long for their bytes."""


@contextlib.contextmanager
def progress_bar(title: str, *, unit: str = "bytes") -> Iterator[Progress | None]:
    """Yields progress(done, in all, what), or None where stderr is closed. unit: of the numbers."""
    if sys.stderr is None:
        yield None
        return
    if not styled(sys.stderr):
        yield ProgressLines(title, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

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
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, what="")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=printable(what)[:40])

        yield show


class ProgressLines:
    """progress(done, in all, what) for the journal and other logs: a line every LINE_SECONDS."""

    def __init__(self, title: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._unit, self._clock = title, unit, clock
        self._last = clock()
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Prints, or leaves it for later. The time that is left goes by the speed of the last RECENT_SECONDS,
        at first since the first call: what an earlier run had done took none of it."""
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, done))
        while len(self._seen) > 1 and now - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()
        if now - self._last < LINE_SECONDS:
            return
        self._last = now
        share = 100 * done / total if total else 100.0
        parts = [f"{share:.0f} %, {self._amount(done)} of {self._amount(total)}", *filter(None, [what])]
        note(f"{self._title}: {', '.join([*parts, *self._left(now, done, total)])}")

    def _amount(self, count: int) -> str:
        return format_size(count) if self._unit == "bytes" else f"{count:,} {self._unit}"

    def _left(self, now: float, done: int, total: int) -> list[str]:
        begin, before = self._seen[0]
        if now <= begin or done <= before:
            return []
        seconds = (total - done) * (now - begin) / (done - before)
        return [f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"]
