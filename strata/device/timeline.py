"""What ran when, per lane, and the questions tests and people ask of it.

`to_chrome` gives the Trace Event Format that chrome://tracing and ui.perfetto.dev open: complete events
("ph": "X") with microseconds, and metadata events that name processes and threads.
Format: Google's "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The lanes of the device; every other lane is drawn under "host".
COMPUTE, H2D, D2H = "compute", "h2d", "d2h"
DEVICE_LANES = (COMPUTE, H2D, D2H)
HOST = "host"
DISK = "disk"
_PROCESSES = ("device", "host")


def socket_lane(node: int) -> str:
    """The lane of the processors of a memory node."""
    return f"socket {node}"


class Span(NamedTuple):
    """Something that kept a lane busy from `start` to `end` (seconds). details: e.g. bytes and label."""

    name: str
    start: float
    end: float
    details: Mapping[str, Any] = {}


class Timeline:
    """Spans per lane. A lane is made by its first span; lanes keep the order in which they were made."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[Span]] = {}

    def __len__(self) -> int:
        """Spans of all lanes."""
        return sum(map(len, self._lanes.values()))

    @property
    def lanes(self) -> list[str]:
        """Names of the lanes that have spans, in order of their first."""
        return list(self._lanes)

    def add(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        """Append a span; ValueError when it ends before it starts."""
        if not end >= start:
            raise ValueError(f"'{name}' on lane '{lane}' ends at {end} s, before its start at {start} s")
        self._lanes.setdefault(lane, []).append(Span(name, start, end, details))

    def spans(self, lane: str, where: Callable[[Span], bool] | None = None) -> list[Span]:
        """Spans of a lane by start time, those that `where` accepts; none for a lane that never ran."""
        found = self._lanes.get(lane, [])
        return sorted(
            (s for s in found if where is None or where(s)), key=lambda span: (span.start, span.end)
        )

    def to_chrome(self) -> dict[str, Any]:
        """The whole timeline as a Trace Event Format object."""
        events: list[dict[str, Any]] = []
        for pid, process in enumerate(_PROCESSES, start=1):
            events.append(_metadata("process_name", pid, 0, name=process))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for tid, lane in enumerate(self._lanes, start=1):
            pid = 1 if lane in DEVICE_LANES else 2
            events.append(_metadata("thread_name", pid, tid, name=lane))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [_complete(span, lane, pid, tid) for span in self.spans(lane)]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """Save as a file that ui.perfetto.dev opens; at no time is a half of it there.

        OSError names `path`.
        """
        text = json.dumps(self.to_chrome(), allow_nan=False)
        try:
            _write_whole(path, text)
        except OSError as error:  # by itself it names the partial file, or none when the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from error


def busy_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The union of spans as sorted, disjoint (start, end) pairs."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(spans: Iterable[Span]) -> float:
    """Time in which at least one of the spans runs."""
    return sum(end - start for start, end in busy_intervals(spans))


def overlap_seconds(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Time in which a span of each runs."""
    a, b = busy_intervals(first), busy_intervals(second)
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def share_under(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How much of the first's busy time lies under the second's: 0 to 1.

    ValueError when the first is never busy: nothing to hide is not "all hidden".
    """
    busy = busy_seconds(first)
    if busy <= 0.0:
        raise ValueError("none of the spans takes any time: their share under others has no meaning")
    return overlap_seconds(first, second) / busy


def hidden_share(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How much of the shorter of the two runs at the same time as the other: 1 is perfect overlap."""
    shorter, longer = sorted((first, second), key=busy_seconds)
    return share_under(shorter, longer)


def _write_whole(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # a pipe or /dev/stdout cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    if path.is_symlink():  # the file behind it is replaced, not the link: it may be /dev/stdout
        path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _complete(span: Span, lane: str, pid: int, tid: int) -> dict[str, Any]:
    # Microseconds with three digits keep nanoseconds; rounding start and end (not the length) keeps
    # neighbours from overlapping by a rounding error.
    start, end = round(span.start * 1e6, 3), round(span.end * 1e6, 3)
    event = {"ph": "X", "name": span.name, "cat": lane, "pid": pid, "tid": tid}
    return event | {"ts": start, "dur": round(end - start, 3), "args": dict(span.details)}
