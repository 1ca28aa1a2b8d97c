"""Results of `strata bench` as a Markdown table, CSV or JSON. Machine-readable figures are in SI units."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from strata.config import format_size
from strata.engine.bench.figures import Result, Run, Spread, op_figures
from strata.interfaces.benchmark import Subject

_COLUMNS = (
    ("model", 22),
    ("size", 10),
    ("backend", 13),
    ("threads", 7),
    ("test", 16),
    ("t/s", 9),
    ("min - max", 17),
    ("GB/s", 7),
    ("memory", 6),
    ("of memory", 9),
    ("GMAC/s", 7),
    ("int8 peak", 9),
    ("of peak", 7),
)
_OP_COLUMNS = (
    ("op", 17),
    ("shape", 36),
    ("calls", 6),
    ("us/call", 10),
    ("us/step", 10),
    ("GB/s", 7),
    ("of memory", 9),
    ("GMAC/s", 7),
    ("of peak", 7),
)
_LEFT = {"model", "backend", "test", "op", "shape"}


def markdown_head(subject: Subject) -> str:
    """The table's first two lines."""
    return _head(_columns(subject))


def _columns(subject: Subject) -> list[tuple[str, int]]:
    """All lines of a table name one model: its column is as wide as a long name needs."""
    return [(name, max(width, len(subject.model) if name == "model" else 0)) for name, width in _COLUMNS]


def markdown_line(subject: Subject, result: Result) -> str:
    """One case. memory, int8 peak: probed around the runs; shares: of each run's own probe, the median."""
    speed = result.spread(lambda run: run.tokens_per_second)
    assert speed is not None
    cells = (
        subject.model,
        format_size(subject.bytes),
        subject.backend,
        str(subject.threads or "-"),
        result.case.label,
        f"{speed.median:.2f}",
        f"{speed.low:.2f} - {speed.high:.2f}",
        _giga(result.spread(lambda run: run.bytes_per_second)),
        _giga(result.spread(lambda run: run.bandwidth)),
        _percent(result.spread(lambda run: run.share)),
        _giga(result.spread(lambda run: run.macs_per_second)),
        _giga(result.spread(lambda run: run.int8_peak)),
        _percent(result.spread(lambda run: run.peak_share)),
    )
    return _row(_columns(subject), cells)


def markdown_ops(result: Result) -> str:
    """A table of one case's ops, and where the rest of a step goes. GB/s: of weights and KV alone."""
    lines = [f"\n{result.case.label}\n", _head(_OP_COLUMNS)]
    for op in op_figures(result):
        cells = (
            op.name,
            op.shape,
            f"{op.calls_per_step:g}",
            f"{op.seconds_per_call * 1e6:.1f}",
            f"{op.seconds_per_step * 1e6:.0f}",
            f"{op.bytes_per_second / 1e9:.1f}" if op.bytes_per_second else "-",
            f"{100 * op.share:.0f} %" if op.share else "-",
            f"{op.macs_per_second / 1e9:.1f}" if op.macs_per_second else "-",
            f"{100 * op.peak_share:.0f} %" if op.peak_share else "-",
        )
        lines.append(_row(_OP_COLUMNS, cells))
    return "\n".join([*lines, "", *_step_lines(result)])


def to_csv(subject: Subject, results: Sequence[Result]) -> str:
    """One line per case, or per op of a case where ops were timed."""
    rows = [row for result in results for row in _csv_rows(subject, result)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(subject: Subject, results: Sequence[Result]) -> dict[str, Any]:
    """Everything: medians, minimum, maximum, each run, and the ops where they were timed."""
    return {"subject": asdict(subject), "results": [_case_json(result) for result in results]}


def _csv_rows(subject: Subject, result: Result) -> list[dict[str, Any]]:
    base = {**asdict(subject), "test": result.case.label, **asdict(result.case), "runs": len(result.runs)}
    ops = op_figures(result)
    if ops:
        return [{**base, **asdict(op)} for op in ops]
    figures = {}
    for name, spread in _spreads(result).items():
        for key, value in asdict(spread).items() if spread else ():
            figures[name if key == "median" else f"{name}_{key}"] = value
        if not spread:
            figures |= {name: None, f"{name}_low": None, f"{name}_high": None}
    return [{**base, **figures}]


def _case_json(result: Result) -> dict[str, Any]:
    spreads = {name: asdict(spread) if spread else None for name, spread in _spreads(result).items()}
    found = {"test": result.case.label, **asdict(result.case), **spreads}
    found["runs"] = [_run_json(run) for run in result.runs]
    if any(run.ops for run in result.runs):
        found["ops"] = [asdict(op) for op in op_figures(result)]
        found["step"] = {name: asdict(spread) for name, spread in _step_shares(result).items()}
    return found


def _run_json(run: Run) -> dict[str, Any]:
    plain = {name: getattr(run, name) for name in ("tokens", "seconds", "bytes", "macs")}
    plain |= {"before": asdict(run.before), "after": asdict(run.after)}
    shares = {"share": run.share, "peak_share": run.peak_share}
    return {**plain, "tokens_per_second": run.tokens_per_second, **shares}


def _spreads(result: Result) -> dict[str, Spread | None]:
    return {
        "tokens_per_second": result.spread(lambda run: run.tokens_per_second),
        "bytes_per_second": result.spread(lambda run: run.bytes_per_second),
        "bandwidth": result.spread(lambda run: run.bandwidth),
        "share": result.spread(lambda run: run.share),
        "macs_per_second": result.spread(lambda run: run.macs_per_second),
        "int8_peak": result.spread(lambda run: run.int8_peak),
        "peak_share": result.spread(lambda run: run.peak_share),
    }


def _step_shares(result: Result) -> dict[str, Spread]:
    """seconds of a step; outside_ops, outside_native: the parts of it not in ops, not in compiled code."""
    found = {
        "seconds": result.spread(lambda run: run.ops.seconds / run.ops.steps if run.ops else None),
        "outside_ops": result.spread(lambda run: run.ops.rest / run.ops.seconds if run.ops else None),
        "outside_native": result.spread(_outside_native),
    }
    return {name: spread for name, spread in found.items() if spread is not None}


def _outside_native(run: Run) -> float | None:
    if run.ops is None or run.ops.native is None:
        return None
    return 1 - run.ops.native / run.ops.seconds


def _step_lines(result: Result) -> list[str]:
    shares = _step_shares(result)
    parts = [f"step: {shares['seconds'].median * 1e6:.0f} us"]
    for name, text in (("outside_ops", "outside of ops"), ("outside_native", "outside of compiled code")):
        if name in shares:
            found = shares[name]
            parts.append(f"{text} {found.median:.1%} ({found.low:.1%} - {found.high:.1%})")
    return ["; ".join(parts)]


def _head(columns: Sequence[tuple[str, int]]) -> str:
    rule = (f"{'-' * (width - 1)}{'-' if name in _LEFT else ':'}" for name, width in columns)
    return f"{_row(columns, [name for name, _ in columns])}\n| {' | '.join(rule)} |"


def _row(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    padded = (
        cell.ljust(width) if name in _LEFT else cell.rjust(width)
        for (name, width), cell in zip(columns, cells, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _giga(spread: Spread | None) -> str:
    return f"{spread.median / 1e9:.1f}" if spread else "-"


def _percent(spread: Spread | None) -> str:
    return f"{100 * spread.median:.0f} %" if spread else "-"
