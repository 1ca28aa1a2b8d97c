"""`strata eval layers` for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from strata.engine.compare_layers import FLOOR, JUMP, LayerErrors, own_errors, suspects

_BAR = 30  # characters of the largest error
_HEAD = ("layer", "max abs", "largest", "cosine", "relative", "own", "routes", "logits")
_WIDTHS = (5, 9, 9, 9, 9, 9, 7, 9)


def describe_layers(names: Sequence[str], tokens: int, errors: Sequence[LayerErrors]) -> str:
    """A table with a bar per layer: its own error."""
    own, marked = own_errors(errors), suspects(errors)
    most = max((error for error in own if math.isfinite(error)), default=0.0)
    lines = [
        f"A  {names[0]}",
        f"B  {names[1]}",
        f"{tokens} tokens in one batch",
        "",
        f"{_row(_HEAD)}  own error",
    ]
    for one, error in zip(errors, own, strict=True):
        jump = "  <- jumps" if one.layer in marked else ""
        lines.append(f"{_row(_cells(one, error))}  {_bar(error, most)}{jump}")
    return "\n".join([*lines, "", *_legend(errors, marked)])


def layers_json(names: Sequence[str], tokens: int, errors: Sequence[LayerErrors]) -> dict[str, Any]:
    """Numbers that are no numbers are null."""
    rows = [{name: _finite(value) for name, value in asdict(one).items()} for one in errors]
    return {
        "a": names[0],
        "b": names[1],
        "tokens": tokens,
        "rule": {"jump": JUMP, "floor": FLOOR},
        "jumps": suspects(errors),
        "layers": rows,
    }


def _legend(errors: Sequence[LayerErrors], marked: Sequence[int]) -> list[str]:
    measured = all(one.own is not None for one in errors)
    lines = [
        "max abs: largest error of the hidden state; largest: the largest magnitude in A's",
        "relative: of the hidden state behind the layer, both models from the same tokens",
        "own: given A's input, of what the layer adds to it"
        if measured
        else "own: what the layer adds, as sqrt(relative^2 - the layer before's^2)",
        f"a layer jumps whose own error is {JUMP:g} times the median layer's, and above {FLOOR:g}",
    ]
    if any(one.routes is not None for one in errors):
        lines.append("routes: chosen experts that are equal; logits: largest difference of the router's")
    found = ", ".join(map(str, marked)) or "none"
    return [*lines, f"layers that jump: {found}"]


def _cells(one: LayerErrors, own: float) -> list[str]:
    return [
        str(one.layer),
        f"{one.max_abs:.3g}",
        f"{one.largest:.3g}",
        f"{one.cosine:.6f}",
        f"{one.relative:.2e}",
        f"{own:.2e}",
        "-" if one.routes is None else f"{one.routes:.1%}",
        "-" if one.logits is None else f"{one.logits:.3g}",
    ]


def _row(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _bar(error: float, most: float) -> str:
    if not math.isfinite(error):
        return "no number"
    return "\u2588" * round(_BAR * error / most) if most else ""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
