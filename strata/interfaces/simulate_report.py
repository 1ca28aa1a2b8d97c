"""Simulated speeds for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from strata.engine.simulate.rounds import ASSUMED, STATED, Found, Round, peak_bytes
from strata.engine.simulate.rounds_words import LANES
from strata.engine.simulate.routes import habits
from strata.engine.simulate.server import Served
from strata.hardware.profile import HardwareProfile
from strata.interfaces.simulation import Simulated, Workload

_WIDTH = 118
_NOTE = (
    "Nothing here was measured: seconds are the cost model's (strata/plan/cost.py, speeds.py: its constants)."
)


def report(found: Sequence[Simulated], machine: HardwareProfile, work: Workload) -> str:
    """A line for each number of requests."""
    first = found[0]
    table = _table(
        "requests",
        "tokens/s",
        "decode",
        "by the plan",
        "prefill",
        "first token",
        "hits",
        "slots",
        "limited by",
    )
    for entry in found:
        served, plan = entry.served, entry.plan
        table.add_row(
            str(entry.requests),
            _rate(served.rate),
            _rate(served.decode_rate),
            _rate(entry.predicted.tokens_per_second),
            _rate(served.prefill_rate),
            f"{served.first_token:.2f} s",
            f"{served.hit_rate:.0%}" if plan.device else "-",
            str(served.slots) if plan.device else "-",
            _limits(served),
        )
    tier = "device" if first.plan.device and first.plan.kv.tier == "device" else "host"
    lines = [
        f"{first.plan.model} on {machine.name}",
        f"{work.prompt} tokens of prompt and {work.answer} of answer; KV pages on the {tier}; "
        f"policy {work.policy}; misses: {first.plan.misses}",
        f"routes: {first.source}",
        "",
        _text(table),
        "",
        _NOTE,
    ]
    return "\n".join(lines)


def to_json(found: Sequence[Simulated], work: Workload) -> list[dict[str, Any]]:
    """Plain data; rates per second, seconds, bytes."""
    return [
        {
            "model": entry.plan.model,
            "machine": entry.plan.machine,
            "requests": entry.requests,
            "prompt": work.prompt,
            "answer": work.answer,
            "policy": work.policy,
            "routes": entry.source,
            "served": _served(entry.served),
            "predicted": dataclasses.asdict(entry.predicted),
            "plan": entry.plan.to_json(),
        }
        for entry in found
    ]


def rounds_report(rounds: Sequence[Round], words: Sequence[Sequence[str]], machine: HardwareProfile) -> str:
    """The table of field report A beside ours, and why they differ."""
    table = _table("round", "theirs", "requests", "ours", "peak", "device busy", "hits", "limited by")
    for entry in rounds:
        for place, found in enumerate(entry.found):
            table.add_row(
                entry.setup.name if place == 0 else "",
                f"{entry.theirs.rate:g}" if place == 0 else "",
                str(found.requests),
                _rate(found.served.rate),
                f"{found.peak / 1e9:.1f} ({entry.theirs.peak / 1e9:g}) GB",
                f"{found.served.busy.get('device', 0.0):.0%} ({entry.theirs.busy:.0%})",
                f"{found.served.hit_rate:.0%}",
                _limits(found.served),
            )
    lines = [f"field report A on {machine.name}; tokens/s of all requests together, theirs in brackets", ""]
    lines += [_text(table), "", *_inputs(), ""]
    for entry, sentences in zip(rounds, words, strict=True):
        lines += [f"{entry.setup.name}:", *(f"  - {text}" for text in sentences)]
    return "\n".join([*lines, "", _NOTE])


def rounds_json(rounds: Sequence[Round], words: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Plain data."""
    return {
        "stated": dataclasses.asdict(STATED),
        "assumed": dataclasses.asdict(ASSUMED),
        "rounds": [
            {
                "setup": dataclasses.asdict(entry.setup),
                "theirs": dataclasses.asdict(entry.theirs),
                "ours": [_found(found) for found in entry.found],
                "explanation": list(sentences),
            }
            for entry, sentences in zip(rounds, words, strict=True)
        ],
    }


def _found(found: Found) -> dict[str, Any]:
    return {
        "requests": found.requests,
        "peak": peak_bytes(found.plan),
        "served": _served(found.served),
        "speeds": dataclasses.asdict(found.speeds),
    }


def _served(served: Served) -> dict[str, Any]:
    return {**dataclasses.asdict(served), "bottleneck": served.bottleneck}


def _inputs() -> list[str]:
    s, a = STATED, ASSUMED
    return [
        f"stated:  {s.shared / 1e9:g}B shared and {s.routed / 1e9:g}B in {s.experts} experts, top {s.top_k}; "
        f"{s.resident} of them resident; at most {s.cap} requests; drafts of {s.draft_length} tokens by a "
        f"model of {s.draft / 1e9:g}B, accepted with {s.acceptance:.0%}",
        f"assumed: {a.layers} layers, hidden {a.hidden}, {a.kv_heads} KV heads of {a.head_dim}; {a.depth} "
        f"tokens of context; routing {habits(s.experts).source}",
    ]


def _table(*columns: str) -> Table:
    """Names to the left in the first and last column, numbers to the right between them."""
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD)
    for name in columns:
        words = name in ("round", "limited by")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def _text(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=_WIDTH, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _limits(served: Served) -> str:
    """Lanes that work for a tenth of the time or more, the busiest first."""
    lanes = sorted(served.busy.items(), key=lambda item: -item[1])
    return ", ".join(f"{LANES[lane]} {share:.0%}" for lane, share in lanes if share >= 0.1)
