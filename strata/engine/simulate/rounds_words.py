"""Why our figures for field report A differ from its own: sentences that follow from the numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strata.engine.simulate.rounds import ASSUMED, STATED, Found, Round, run_round
from strata.hardware.profile import HardwareProfile
from strata.plan.cost import Lane, Placement, Step, Usage, expected_cost, step_cost
from strata.plan.footprint import Footprint
from strata.plan.routing import HitCurve, distinct_experts
from strata.plan.speeds import Speeds

CLOSE = 1.15
"""Figures within this factor of each other count as equal: the model knows no better."""
LANES: dict[Lane, str] = {
    "device": "the device",
    "to_device": "the bus to the device",
    "to_host": "the bus to the host",
    "host": "processors and memory",
    "disk": "the disk",
    "handshakes": "handshakes",
}


@dataclass(frozen=True)
class Demand:
    """Bytes of experts that a token needs, and what lanes would have to carry at the report's rate."""

    per_token: float
    per_second: float
    bus: float
    memory: float


def explain(rounds: Sequence[Round], machine: HardwareProfile) -> list[list[str]]:
    """Sentences for each round."""
    first, second, third = rounds
    return [
        [*_rates(first), *_carried(first)],
        [*_rates(second), *_hits(second)],
        [*_rates(third), *_speculation(second, third, machine)],
    ]


def demand(model: Footprint, speeds: Speeds, requests: int, rate: float) -> Demand:
    """If none of a token's experts were on the device yet. Tokens of a step share what both need."""
    step = Step.decode(requests, ASSUMED.depth)
    nothing = Placement(True, 0, True, model.expert_count)
    found = step_cost(model, speeds, nothing, step, HitCurve((), "none"))
    per_token = found.distinct * model.moe_layers * model.expert_bytes / requests
    needed = per_token * rate
    return Demand(per_token, needed, needed / speeds.to_device, needed / speeds.host_read)


def rate_at(entry: Round, found: Found, hits: float) -> float:
    """Tokens per second of plain decoding if this share of the experts were found on the device."""
    plan, step, model = found.plan, Step.decode(found.requests, ASSUMED.depth), entry.model
    distinct = distinct_experts(found.requests, model.experts, model.top_k)
    place = Placement(True, 0, plan.kv.tier == "device", plan.host.in_memory, plan.misses)
    use = Usage(distinct, (1 - hits) * distinct, 0.0)
    return expected_cost(model, found.speeds, place, step, use).rate


def hits_needed(entry: Round, found: Found, rate: float) -> float | None:
    """The hit rate at which plain decoding reaches `rate`; None when none does."""
    low, high = 0.0, 1.0
    if rate_at(entry, found, high) < rate:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if rate_at(entry, found, middle) >= rate else (middle, high)
    return high


def _rates(entry: Round) -> Iterator[str]:
    for found in entry.found:
        ours, theirs = found.served.rate, entry.theirs.rate
        which = (
            "as fast as"
            if 1 / CLOSE <= ours / theirs <= CLOSE
            else "slower than"
            if ours < theirs
            else "faster than"
        )
        factor = "" if which == "as fast as" else f" {max(ours / theirs, theirs / ours):.1f} times"
        yield (
            f"With {_requests(found)} ours is{factor} {which} theirs: {ours:.1f} and {theirs:g} tokens/s, "
            f"limited by {LANES[found.served.bottleneck]}."
        )


def _carried(entry: Round) -> Iterator[str]:
    for found in entry.found:
        need = demand(entry.model, found.speeds, found.requests, entry.theirs.rate)
        lanes: dict[Lane, float] = {"to_device": need.bus, "host": need.memory}
        over = [
            f"{factor:.1f} times what {LANES[lane]} can carry" for lane, factor in lanes.items() if factor > 1
        ]
        verdict = " and ".join(over) if over else "which bus and memory can carry"
        yield (
            f"With {_requests(found)} a token needs {need.per_token / 1e9:.1f} GB of experts; "
            f"{entry.theirs.rate:g} tokens/s are {need.per_second / 1e9:.0f} GB/s, {verdict}."
        )


def _hits(entry: Round) -> Iterator[str]:
    device = entry.found[0].plan.device
    assert device is not None
    share = device.slots / entry.model.expert_count
    for found in entry.found:
        needed = hits_needed(entry, found, entry.theirs.rate)
        told = f"{entry.theirs.rate:g} tokens/s take {needed or 0:.0%}"
        if needed is None:
            told = f"even with every expert there it is {rate_at(entry, found, 1.0):.1f}"
        seen = rate_at(entry, found, STATED.hits)
        yield (
            f"With {_requests(found)} and {share:.0%} of the experts in slots, routing as in a published "
            f"model finds {found.served.hit_rate:.0%} on the device. With the {STATED.hits:.0%} that the "
            f"report saw it is {seen:.1f} tokens/s; {told}."
        )
        yield from _kv(entry, found)


def _kv(entry: Round, found: Found) -> Iterator[str]:
    """What KV pages in host memory cost, and the longest context that leaves room for the report's rate."""
    if found.plan.kv.tier != "host":
        return
    attention = entry.model.attention
    read = found.requests * attention.seen(ASSUMED.depth) * attention.new_bytes
    steps = found.served.rate / found.served.tokens_per_step
    share = read / found.speeds.to_device * steps
    longest = found.speeds.to_device / (entry.theirs.rate * attention.token_bytes)
    yield (
        f"Its KV pages in host memory are {read / 1e9:.2f} GB that cross the bus in each step, {share:.0%} "
        f"of the time, for {ASSUMED.depth} tokens and {ASSUMED.kv_heads} KV heads of {ASSUMED.head_dim} "
        f"(assumed): {entry.theirs.rate:g} tokens/s are possible up to {longest:.0f} tokens."
    )


def _speculation(plain: Round, entry: Round, machine: HardwareProfile) -> Iterator[str]:
    a, n = STATED.acceptance, STATED.draft_length
    expected = (1 - a ** (n + 1)) / (1 - a)
    theirs = entry.theirs.rate / plain.theirs.rate
    for before, found in zip(plain.found, entry.found, strict=True):
        gain = found.served.rate / before.served.rate
        yield (
            f"With {_requests(found)} a verification of {n + 1} tokens keeps {expected:.1f} of them, but "
            f"touches {found.served.distinct:.1f} experts per layer instead of {before.served.distinct:.1f}: "
            f"the rate changes by a factor of {gain:.2f}, theirs by {theirs:.2f}."
        )
        length, best = _best_length(entry, before, found, machine)
        yield f"Of drafts of 0, 2, 4 and {n} tokens, {length} is the fastest here: {best:.1f} tokens/s."


def _best_length(entry: Round, plain: Found, full: Found, machine: HardwareProfile) -> tuple[int, float]:
    rates = {0: plain.served.rate, STATED.draft_length: full.served.rate}
    for length in (2, 4):
        found = run_round(entry.setup, entry.model, machine, full.requests, length=length)
        rates[length] = found.served.rate
    best = max(rates, key=lambda length: rates[length])
    return best, rates[best]


def _requests(found: Found) -> str:
    return f"{found.requests} request{'s' if found.requests > 1 else ''}"
