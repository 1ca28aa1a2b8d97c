"""`strata convert --budget`: the choice of formats, as it is told."""

from __future__ import annotations

from pathlib import Path

from strata.config import format_as, format_size
from strata.interfaces.importing import Refine
from strata.interfaces.terminal import note
from strata.model.resolve import Resolved
from strata.store.budget import Choice, choose_formats
from strata.store.calibration import CalibrationStats
from strata.store.options import ConvertOptions
from strata.store.source import CheckpointSource


def within(budget: int, stats: Path, asked: str) -> Refine:
    """Chooses formats for at most `budget` bytes by the statistics in `stats`, and prints them as a table.

    asked: the budget as the user wrote it.
    """
    found = CalibrationStats(stats)

    def refine(source: CheckpointSource, resolved: Resolved, options: ConvertOptions) -> ConvertOptions:
        model = source, resolved.spec, resolved.targets, resolved.experts
        choice = choose_formats(*model, options, found, budget)
        for line in table(choice, asked):
            note(line)
        return choice.options

    return refine


_WHAT_ERRORS_ARE = (
    "errors are shares of the squares of a part's outputs, no KL and no promise: "
    "`strata eval compare SOURCE STORE --record` measures what the store lost"
)


def table(choice: Choice, asked: str) -> list[str]:
    """A line per part and run of layers with the same format; errors are means over the run.

    asked: the budget as the user wrote it; the total stands in the same unit.
    """
    runs: list[tuple[str, str, list[tuple[int | None, int, float]]]] = []
    ordered = sorted(choice.chosen.items(), key=lambda item: item[0].name)  # stable: layers stay in order
    for unit, offer in ordered:
        if not runs or runs[-1][:2] != (unit.name, offer.format):
            runs.append((unit.name, offer.format, []))
        runs[-1][2].append((unit.layer, offer.bytes, offer.error))
    lines = [f"{'part':21} {'layers':>9} {'format':>7} {'bytes':>10}  error of its outputs"]
    for part, fmt, several in runs:
        first, last = several[0][0], several[-1][0]
        layers = "" if first is None else str(first) if first == last else f"{first}-{last}"
        error = sum(entry[2] for entry in several) / len(several)
        size = format_size(sum(entry[1] for entry in several))
        lines.append(f"{part:21} {layers:>9} {fmt:>7} {size:>10}  {error:.2e}")
    total = f"weights: {format_as(choice.bytes, asked)} of a budget of {asked.strip()}"
    return [*lines, total, _WHAT_ERRORS_ARE]
