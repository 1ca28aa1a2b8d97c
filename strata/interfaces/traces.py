"""Trace files as commands take them: recorded ones, and routes as CSV."""

from __future__ import annotations

from pathlib import Path

from strata.errors import UsageError
from strata.memory.routes_csv import is_routes_csv, read_routes
from strata.memory.trace import TraceFile, TraceSource


def open_traces(path: Path, only: str | None = None) -> list[TraceSource]:
    """The traces of a file; of a CSV those whose name has `only` in it. UsageError when there is none, or
    where a recorded trace leaves nothing to choose."""
    if not is_routes_csv(path):
        if only is not None:
            raise UsageError(
                f"--only {only}: {path} holds one trace",
                remedy="leave it out; it chooses among those of a CSV",
            )
        return [TraceFile(path)]
    routes = read_routes(path)
    chosen: list[TraceSource] = [source for name, source in routes.items() if not only or only in name]
    if not chosen:
        raise UsageError(f"no trace of {path} has {only!r} in its name", remedy=f"it has {', '.join(routes)}")
    return chosen
