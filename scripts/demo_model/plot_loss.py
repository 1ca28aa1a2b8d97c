"""Draw the validation losses of a training log as an SVG.

usage: python -m demo_model.plot_loss --log FILE.jsonl --out FILE.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 760, 400, 60, 40  # pixels; LEFT and TOP are the margins
COLOURS = ("#4363d8", "#e6194b", "#3cb44b", "#f58231", "#911eb4", "#008080", "#222222")


def position(step: float, value: float, last: float, top: float) -> tuple[float, float]:
    """Pixel of a point: steps to the right, nats upwards from 0."""
    x = LEFT + step / last * (WIDTH - LEFT - 110)
    return round(x, 1), round(HEIGHT - TOP - value / top * (HEIGHT - 2 * TOP), 1)


def curve(name: str, points: list[tuple[float, float]], colour: str, label_y: float) -> str:
    """One polyline with its name at the right."""
    path = " ".join(f"{x},{y}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    return f'{line}<text x="{WIDTH - 100}" y="{label_y:.0f}" fill="{colour}">{name}</text>'


def axes(last: int, top: float) -> list[str]:
    """Grid lines with numbers."""
    out = []
    for value in range(int(top) + 1):
        x, y = position(0, value, last, top)
        out.append(
            f'<path d="M{x} {y}H{WIDTH - 110}" stroke="#ddd"/><text x="{x - 20}" y="{y + 4}">{value}</text>'
        )
    for part in range(5):
        step = last * part // 4
        x, y = position(step, 0, last, top)
        out.append(f'<text x="{x - 10}" y="{y + 18}">{step}</text>')
    out.append(f'<text x="{WIDTH // 2 - 40}" y="{HEIGHT - 5}">step</text>')
    out.append(f'<text x="{LEFT}" y="20">validation loss, nats per token</text>')
    return out


def draw(lines: list[dict[str, Any]]) -> str:
    """The whole picture.  A log's last line is the final evaluation, on more text: not part of the curve."""
    lines = lines[:-1]
    last = lines[-1]["step"]
    names = list(lines[-1]["val"])
    top = max(max(line["val"][n] for n in names if n in line["val"]) for line in lines) * 1.02
    body = axes(last, top)
    ends = sorted(names, key=lambda n: -lines[-1]["val"][n])
    for row, name in enumerate(ends):
        points = [position(e["step"], e["val"][name], last, top) for e in lines if name in e["val"]]
        label = f"{name} {lines[-1]['val'][name]:.2f}"
        body.append(curve(label, points, COLOURS[row % len(COLOURS)], TOP + 20 * row + 20))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    return head + 'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"


def main() -> None:
    """Read the log, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    args.out.write_text(draw(lines))


if __name__ == "__main__":
    main()
