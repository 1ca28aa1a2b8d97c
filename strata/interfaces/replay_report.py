"""Results of `strata trace replay` as a table, JSON, and a chart in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.sax.saxutils import escape

from strata.config import format_size
from strata.memory.replay import BELADY, ReplayResult
from strata.memory.trace import TraceSource

_COLUMNS = (
    ("slots", 6),
    ("share", 6),
    ("policy", -9),
    ("hits", 7),
    ("of bound", 9),
    ("inserts", 9),
    ("evictions", 9),
    ("moved", 10),
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT = 720, 400, 60, 50, 130  # pixels; the last three are margins
_COLOURS = ("#4363d8", "#e6194b", "#3cb44b", "#f58231", "#911eb4")


def table(trace: TraceSource, results: Sequence[ReplayResult]) -> str:
    """One line per number of slots and policy. of bound: hits per hit of Belady's rule."""
    total = trace.header.space.total
    lines = [f"{trace.header.model}: {total} experts in {trace.header.space.routed_layers} layers"]
    lines += [f"{results[0].accesses} accesses of decode", "", _row([name for name, _ in _COLUMNS])]
    for result in results:
        cells = (
            str(result.slots),
            f"{result.slots / total:.0%}",
            result.policy,
            f"{result.hit_rate:.2%}",
            f"{result.share_of_bound:.1%}",
            str(result.inserts),
            str(result.evictions),
            format_size(result.bytes) if result.bytes else "-",
        )
        lines.append(_row(cells))
        lines += [""] if result.policy == BELADY else []
    return "\n".join(lines)


def to_json(trace: TraceSource, results: Sequence[ReplayResult]) -> dict[str, Any]:
    """Everything of the table; rates as fractions."""
    space = trace.header.space
    rows = [
        {**asdict(result), "hit_rate": result.hit_rate, "share_of_bound": result.share_of_bound}
        for result in results
    ]
    head = {"trace": trace.header.model, "experts": space.total, "layers": space.routed_layers}
    return {**head, "results": rows}


def chart(trace: TraceSource, results: Sequence[ReplayResult]) -> str:
    """Hit rate over slots as an SVG, a line per policy, Belady's bound dashed."""
    total = max(trace.header.space.total, max(result.slots for result in results), 1)
    body = _axes(total)
    names = list(dict.fromkeys(result.policy for result in results))
    for number, name in enumerate(names):
        points = sorted((r.slots / total, r.hit_rate) for r in results if r.policy == name)
        colour = "#222222" if name == BELADY else _COLOURS[number % len(_COLOURS)]
        body.append(_line(name, points, colour, dashed=name == BELADY))
        body.append(
            f'<text x="{_WIDTH - _RIGHT + 15}" y="{_TOP + 18 * number}" fill="{colour}">{name}</text>'
        )
    title = escape(f"{trace.header.model}: hit rate over slots", {'"': "&quot;"})
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
    head += (
        f'font-family="sans-serif" font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
    )
    return f'{head}\n<text x="{_LEFT}" y="24">{title}</text>\n' + "\n".join(body) + "\n</svg>\n"


def _row(cells: Sequence[str]) -> str:
    padded = (
        cell.rjust(width) if width > 0 else cell.ljust(-width)
        for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
    )
    return "  ".join(padded).rstrip()


def _place(share: float, rate: float) -> tuple[float, float]:
    """Pixel of a point: share of the experts to the right, hit rate upwards."""
    x = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
    return round(x, 1), round(_HEIGHT - 40 - rate * (_HEIGHT - 40 - _TOP), 1)


def _axes(total: int) -> list[str]:
    out = []
    for part in range(5):
        share = part / 4
        x, y = _place(0, share)
        right, bottom = _place(share, 0)
        out.append(f'<path d="M{x} {y}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 40}" y="{y + 4}">{share:.0%}</text>')
        out.append(f'<text x="{right - 10}" y="{bottom + 18}">{round(share * total)}</text>')
    return out


def _line(name: str, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    places = [_place(share, rate) for share, rate in points]
    path = " ".join(f"{x},{y}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>{dots}'
