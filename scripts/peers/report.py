"""The comparison as a Markdown table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.figures import Pair, Ratios, Sample, ratios, two_states
from peers.workloads import LLAMA, Peer, Workload, workloads

_COLUMNS = (
    *("peer", "ISA", "test", "memory", "pairs", "peer t/s", "Strata t/s", "of bandwidth"),
    *("ratio min", "median", "max", "target", "reached"),
)
_LEFT = {"peer", "ISA", "test", "memory", "reached"}


@dataclass(frozen=True)
class Row:
    """A workload against a peer, with all its pairs."""

    peer: Peer
    work: Workload
    pairs: tuple[Pair, ...]


def threshold(rows: Sequence[Row]) -> float | None:
    """Bytes/s between the machine's two states, over all probes of the comparison."""
    return two_states(probe for row in rows for pair in row.pairs for probe in pair.probes)


def target(row: Row, found: Ratios) -> float | None:
    """The ratio to reach: the slow state's where the memory was slow, the fast one's otherwise, none where it
    changed meanwhile."""
    goals = row.work.targets.get(row.peer.name)
    if goals is None or found.state == "mixed":
        return None
    return goals[1] if found.state == "slow" else goals[0]


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Notes as a list, then one line per row and state. Ratios above 1: Strata is faster."""
    limit = threshold(rows)
    rule = ["---" if name in _LEFT else "---:" for name in _COLUMNS]
    lines = [f"- {note}" for note in (*notes, *_version_notes(rows), _state_note(rows, limit))]
    lines += ["", _line(_COLUMNS), _line(rule)]
    lines += [_line(_cells(row, found)) for row in rows for found in ratios(row.pairs, limit)]
    return "\n".join(lines) + "\n"


def to_json(rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """Everything, every pair and probe included. Speeds in tokens/s, bandwidth in bytes/s."""
    limit = threshold(rows)
    return {
        "notes": list(notes),
        "threshold": limit,
        "rows": [
            {
                "peer": row.peer.name,
                "isa": row.peer.isa,
                "test": row.work.label,
                "ratios": [
                    {**asdict(found), "target": target(row, found)} for found in ratios(row.pairs, limit)
                ],
                "pairs": [{**asdict(pair), "ratio": pair.ratio} for pair in row.pairs],
            }
            for row in rows
        ],
    }


def merged(documents: Sequence[dict[str, Any]]) -> tuple[list[Row], list[str]]:
    """Rows and notes of several `to_json`: rows in the order of the workloads, one for all pairs of a test
    that have the version of its last one.

    KeyError, TypeError: it is none.
    """
    known = {work.label: work for work in workloads(1)}
    pairs: dict[tuple[str, str, str], list[Pair]] = {}
    for row in (row for document in documents for row in document["rows"]):
        found = pairs.setdefault((row["peer"], row["isa"], row["test"]), [])
        found += (
            Pair(Sample(**pair["peer"]), Sample(**pair["ours"]), pair.get("version", ""))
            for pair in row["pairs"]
        )
    rows = [
        Row(Peer(name, isa, Path(name)), known[label], _newest(found))
        for (name, isa, label), found in pairs.items()
    ]
    order = list(known)
    rows.sort(key=lambda row: (row.peer.name != LLAMA, row.peer.isa, order.index(row.work.label)))
    return rows, list(dict.fromkeys(note for document in documents for note in document["notes"]))


def _newest(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs if pair.version == pairs[-1].version)


def _version_notes(rows: Sequence[Row]) -> list[str]:
    """Which rows were measured with which kernels."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for version in dict.fromkeys(pair.version for pair in row.pairs if pair.version):
            found.setdefault(version, []).append(f"{row.peer.name} {row.peer.isa} {row.work.label}")
    if len(found) == 1:
        return [f"Strata's kernels: {version}" for version in found]
    return [f"Strata's kernels {version}: {', '.join(names)}" for version, names in found.items()]


def _state_note(rows: Sequence[Row], limit: float | None) -> str:
    probes = sorted(probe / 1e9 for row in rows for pair in row.pairs for probe in pair.probes)
    if not probes:
        return "nothing was measured"
    span = f"{probes[0]:.1f} to {probes[-1]:.1f} GB/s, median {probes[len(probes) // 2]:.1f}"
    if limit is None:
        return f"memory: {span}; one state"
    return f"memory: {span}; two states, fast from {limit / 1e9:.1f} GB/s on, mixed: it changed within a pair"


def _cells(row: Row, found: Ratios) -> list[str]:
    goal = target(row, found)
    reached = "-" if goal is None else "yes" if found.median >= goal else "**no**"
    return [
        *(row.peer.name, row.peer.isa, row.work.label, found.state, str(found.pairs)),
        *(f"{found.peer:.1f}", f"{found.ours:.1f}"),
        f"{100 * found.share:.0f} %" if found.share is not None and row.work.kind == "decode" else "-",
        *(f"{value:.2f}" for value in (found.low, found.median, found.high)),
        f"{goal:.2f}" if goal else "-",
        reached,
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
