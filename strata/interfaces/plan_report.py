"""A Plan for people: tables of what lies where, what is predicted, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from strata.config import format_size
from strata.hardware.files import format_cpu_list
from strata.hardware.profile import HardwareProfile
from strata.interfaces.terminal import printable
from strata.plan.plan import Part, Plan, Prediction

_WIDTH = 110
_LANES = {
    "device": "device",
    "to_device": "bus to the device",
    "to_host": "bus to the host",
    "host": "processors and their memory",
    "disk": "disk",
    "handshakes": "handshakes",
}


def report(plan: Plan, machine: HardwareProfile, *, width: int | None = None, styled: bool = False) -> str:
    """All of it. width None: for a reader that is no terminal."""
    text = StringIO()
    console = Console(file=text, width=width or _WIDTH, force_terminal=styled, no_color=not styled)
    for block in _blocks(plan, machine):
        if isinstance(block, Table):
            console.print(block)
        else:
            console.print(block, markup=False, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def summary(plan: Plan, machine: HardwareProfile) -> str:
    """What a run says when it starts: where things lie, and how fast it should be. Two or three lines."""
    kv = plan.kv
    lines = [
        f"plan     {format_size(kv.nbytes)} of {kv.dtype} KV on the {kv.tier}: {kv.context} tokens x "
        f"{kv.requests}; {_experts(plan)}{_threads(plan)}"
    ]
    if plan.device:
        lines.append(f"device   {_device(plan)}")
    decode, prefill = plan.predictions[0], plan.predictions[-1]
    assumed = sorted(_assumed(plan, machine))
    basis = f" (not measured: {', '.join(assumed)}; see strata doctor)" if assumed else ""
    lines.append(
        f"predict  decode {_rate(decode.tokens_per_second)} tokens/s at {decode.depth} tokens, prefill "
        f"{_rate(prefill.tokens_per_second)}, limited by {_LANES[decode.bottleneck]}{basis}"
    )
    return "\n".join(lines)


def _experts(plan: Plan) -> str:
    """How many experts are where; "" for a dense model."""
    if not plan.experts:
        return ""
    rest = plan.experts - plan.host.in_memory
    return f"{plan.host.in_memory} experts in memory{f', {rest} on disk' if rest else ''}; "


def _threads(plan: Plan) -> str:
    where = f" on CPUs {format_cpu_list(plan.cpus)}" if plan.bind else ""
    return f"{len(plan.cpus)} thread{'s' if len(plan.cpus) > 1 else ''}{where}"


def _draft_threads(plan: Plan) -> str:
    """Where the draft computes: on the home node, or where the model does, when that does not."""
    assert plan.draft is not None
    if not plan.draft.cpus:
        return "on the model's threads, in turn with it"
    count, where = len(plan.draft.cpus), format_cpu_list(plan.draft.cpus) if plan.bind else "unbound"
    return (
        f"{count} thread{'s' * (count > 1)} on node {plan.nodes[0]} (CPUs {where}), in turn with the model's"
    )


def _device(plan: Plan) -> str:
    device = plan.device
    assert device is not None
    fixed = device.total - device.shared
    return (
        f"{format_size(device.total)}: {format_size(fixed)} of weights, workspace and reserve, "
        f"{device.slots} to {device.slots_beside(0)} of {plan.experts} expert slots; misses: {plan.misses}"
    )


def _blocks(plan: Plan, machine: HardwareProfile) -> Iterator[Table | str]:
    yield f"{printable(plan.model)} on {printable(plan.machine)}"
    yield from _facts(plan)
    if plan.device:
        yield "\ndevice memory"
        yield _parts(plan.device.parts, plan.device.total)
    yield "\nhost memory"
    yield _parts(plan.host.parts, plan.host.total)
    if len(machine.nodes) > 1 and plan.host.in_memory:
        yield "\nexperts over the memory nodes"
        yield _spreads(plan)
    yield "\npredicted speed"
    yield _predictions(plan.predictions, plan.device is not None)
    yield ""
    yield from _remarks(plan, machine)
    if plan.advice:
        yield "\nto go faster"
        yield _advice(plan)


def _facts(plan: Plan) -> Iterator[str]:
    kv = plan.kv
    yield (
        f"context   {kv.context} tokens x {kv.requests} request{'s' if kv.requests > 1 else ''}: at most "
        f"{format_size(kv.nbytes)} of {kv.dtype} KV ({kv.nbytes} bytes, {kv.pages} pages), on the {kv.tier}"
    )
    yield f"step      at most {plan.running} requests, {plan.chunk} prompt tokens"
    if plan.draft:
        yield (
            f"draft     {printable(plan.draft.model)}: {format_size(plan.draft.weights)} of weights, "
            f"{format_size(plan.draft.nbytes)} of KV for {plan.draft.context} tokens, on the host, "
            f"{_draft_threads(plan)}"
        )
    for node in plan.threads:
        where = f"on CPUs {format_cpu_list(node.cpus)}" if plan.bind else "unbound"
        yield f"threads   node {node.node}: {len(node.cpus)}, {where}"
    device = plan.device
    if device and device.slot_bytes:
        yield (
            f"experts   {format_size(device.slot_bytes)} each; {device.slots} slots when the KV cache is "
            f"full, {device.slots_beside(0)} while it is empty; misses: {plan.misses}"
        )


def _table(*columns: tuple[str, bool]) -> Table:
    """Columns by name; True: numbers, to the right."""
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD)
    for name, number in columns:
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _parts(parts: Sequence[Part], total: int) -> Table:
    table = _table(("what", False), ("size", True), ("bytes", True), ("", False))
    for part in parts:
        if part.nbytes:
            table.add_row(part.name, format_size(part.nbytes), f"{part.nbytes:,}", part.note)
    table.add_row("together", format_size(total), f"{total:,}", "")
    return table


def _spreads(plan: Plan) -> Table:
    table = _table(("host.numa", False), ("each node", True), ("", False))
    for entry in plan.host.spreads:
        chosen = "chosen" if entry.spread == plan.host.spread else ""
        note = ", ".join(filter(None, (entry.problem or "fits", chosen)))
        table.add_row(entry.spread, format_size(max(entry.nbytes)), note)
    return table


def _predictions(predictions: Sequence[Prediction], shown: bool) -> Table:
    table = _table(
        ("what", False), ("tokens/s", True), ("at least", True), ("hits", True), ("limited by", False)
    )
    for entry in predictions:
        what = f"prefill of {entry.depth} tokens"
        if entry.name == "decode":
            several = f"{entry.requests} requests" if entry.requests > 1 else "1 request"
            what = f"decode, {several} at {entry.depth} tokens"
        hits = f"{entry.hit_rate:.0%}" if shown else ""
        table.add_row(what, _rate(entry.tokens_per_second), _rate(entry.floor), hits, _limits(entry))
    return table


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _limits(entry: Prediction) -> str:
    """The bottleneck, and the other lanes that work for a tenth of the time or more."""
    lanes = sorted(entry.busy.items(), key=lambda item: -item[1])
    return ", ".join(f"{_LANES[lane]} {share:.0%}" for lane, share in lanes if share >= 0.1)


def _remarks(plan: Plan, machine: HardwareProfile) -> Iterator[str]:
    if plan.device and plan.routing:
        yield f"hits: {plan.routing}; at least: uniform routing. Your model and texts decide."
    assumed = sorted(_assumed(plan, machine))
    if assumed:
        yield f"not measured: {', '.join(assumed)}"
    if plan.device:
        yield "A run leaves the card idle unless device.use is cuda, and none of this was run on a GPU."
    for text in plan.warnings:
        yield f"warning: {printable(text)}"
    for text in plan.notes:
        yield f"note: {printable(text)}"


def _assumed(plan: Plan, machine: HardwareProfile) -> Iterator[str]:
    """Speeds of the profile that nobody measured on this machine, with their source."""
    rates = {"memory read": machine.node_read[0], "core": machine.processor.core_macs}
    if plan.host.disk_bytes:
        rates["disk"] = machine.disk_read
    if plan.device and machine.device:
        rates |= {"copies": machine.device.to_device, "device read": machine.device.read}
        rates["device products"] = machine.device.macs
    for name, rate in rates.items():
        if rate.source != "measured":
            yield f"{name} ({rate.source})"


def _advice(plan: Plan) -> Table:
    table = _table(("change", False), ("decode", True), ("prefill", True))
    for entry in plan.advice:
        table.add_row(entry.change, *(f"{factor - 1:+.0%}" for factor in (entry.decode, entry.prefill)))
    return table
