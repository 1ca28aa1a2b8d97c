"""Field report A rebuilt: 40, 72 and 108 tokens/s of a 125B model on one RTX 3090, from what it had.

Inputs are what the report states of hardware, model and set-up (STATED) and, where it is silent, what is
named under ASSUMED. What it measured (THEIRS) is put beside our results and goes into none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core import PAGE_TOKENS
from strata.engine.simulate.routes import HabitRoutes, habits
from strata.engine.simulate.server import Load, Served, Simulator, Speculation
from strata.errors import CapacityError
from strata.hardware.profile import HardwareProfile
from strata.plan.cost import Misses
from strata.plan.footprint import Attention, Footprint
from strata.plan.options import RESERVE, PlanOptions, Tier
from strata.plan.plan import Plan
from strata.plan.planner import make_plan
from strata.plan.speeds import Speeds, speeds_of
from strata.store.formats import FORMATS, PackedShape

PROFILE = "rtx3090-2x-e5-2680v4"
"""The machine of the report."""


@dataclass(frozen=True)
class Stated:
    """What field report A says of the model and the set-up. hits: of the resident experts, on their traffic;
    it explains and goes into no result."""

    shared: int = 10_000_000_000
    routed: int = 115_000_000_000
    experts: int = 64
    top_k: int = 2
    resident: int = 12
    cap: int = 16
    draft: int = 1_000_000_000
    draft_length: int = 8
    acceptance: float = 0.72
    hits: float = 0.9


@dataclass(frozen=True)
class Assumed:
    """What it does not say. layers, hidden, heads: like models of that size (GLM-4.5-Air, 106B: 46 layers,
    hidden 4096, 96 query and 8 KV heads of 128). depth: tokens of context; answer: tokens of each request of
    the simulation. draft_layers: of a model of one billion parameters (Llama 3.2 1B: 16)."""

    layers: int = 40
    hidden: int = 6144
    heads: int = 48
    kv_heads: int = 8
    head_dim: int = 128
    depth: int = 2048
    answer: int = 64
    draft_layers: int = 16


@dataclass(frozen=True)
class Reported:
    """What the report measured. rate: tokens/s; peak: bytes of device memory; busy: share of the time."""

    rate: float
    peak: float
    busy: float


STATED, ASSUMED = Stated(), Assumed()
THEIRS = (Reported(40, 24e9, 0.30), Reported(72, 21e9, 0.75), Reported(108, 22e9, 0.83))


@dataclass(frozen=True)
class Setup:
    """One round. shared, experts: weight formats. misses: how experts that are not resident are had."""

    name: str
    shared: str
    experts: str
    kv: str
    tier: Tier
    resident: int
    reserve: int
    misses: Misses
    speculation: bool


SETUPS = (
    Setup("BF16, no cache, KV on the card", "bf16", "bf16", "f16", "device", 0, 0, "auto", False),
    Setup("INT4, cache, KV offload, batching", "w4g128", "w4g64", "int8", "host", 12, RESERVE, "auto", False),
    Setup("the same and speculation", "w4g128", "w4g64", "int8", "host", 12, RESERVE, "auto", True),
)


@dataclass(frozen=True)
class Found:
    """A round with so many requests at a time. peak: bytes of device memory in use."""

    requests: int
    plan: Plan
    speeds: Speeds
    served: Served
    peak: int


@dataclass(frozen=True)
class Round:
    """One row of the table. found: with one request, and with as many as fit, up to the report's cap."""

    setup: Setup
    theirs: Reported
    model: Footprint
    found: tuple[Found, ...]


def bits(fmt: str) -> float:
    """Bits per weight with the scales, of a matrix of 4096 x 4096."""
    if fmt in ("bf16", "f16"):
        return 16.0
    return PackedShape(FORMATS[fmt], 4096, 4096).nbytes * 8 / 4096**2


def field_model(setup: Setup) -> Footprint:
    """The report's model in the formats of a round. Embedding and head are among the shared weights."""
    a, s = ASSUMED, STATED
    per_value = {"f16": 2, "int8": 1}[setup.kv]
    scale = 4 if setup.kv == "int8" else 0
    new = 2 * a.kv_heads * (a.head_dim * per_value + scale)
    expert = s.routed // s.experts // a.layers
    nbytes = int(expert * bits(setup.experts) / 8)
    return Footprint(
        name=f"125B ({setup.experts})",
        layers=a.layers,
        moe_layers=a.layers,
        hidden=a.hidden,
        vocab=0,
        context=1 << 17,
        static=int(s.shared * bits(setup.shared) / 8),
        static_macs=s.shared,
        head=0,
        head_macs=0,
        embedding=0,
        tied=False,
        experts=s.experts,
        top_k=s.top_k,
        expert_bytes=nbytes,
        expert_macs=expert,
        expert_total=nbytes * s.experts * a.layers,
        slices=2,
        attention=Attention((0,) * a.layers, 2 * a.heads * a.head_dim, new),
        kv_dtype="int8" if setup.kv == "int8" else "bf16",  # their f16 is as large
        page_tokens=PAGE_TOKENS,
        activation_bytes=4 * 4 * a.hidden,
    )


def draft_model() -> Footprint:
    """The draft: dense, in the shared weights' format; its KV is left out."""
    a, s = ASSUMED, STATED
    target = field_model(SETUPS[1])
    return dataclasses.replace(
        target,
        name="draft",
        layers=a.draft_layers,
        moe_layers=0,
        static=int(s.draft * bits("w4g128") / 8),
        static_macs=s.draft,
        experts=0,
        top_k=0,
        expert_bytes=0,
        expert_macs=0,
        expert_total=0,
        attention=Attention((0,) * a.draft_layers, 0, 0),
    )


def rebuild(machine: HardwareProfile, seed: int = 0) -> list[Round]:
    """The three rounds on a machine with a device. Raises CapacityError when a round does not fit at all."""
    rounds = []
    for setup, theirs in zip(SETUPS, THEIRS, strict=True):
        model = field_model(setup)
        rounds.append(Round(setup, theirs, model, tuple(_found(setup, model, machine, seed))))
    return rounds


def _found(setup: Setup, model: Footprint, machine: HardwareProfile, seed: int) -> Iterator[Found]:
    yield run_round(setup, model, machine, 1, seed)
    for requests in range(STATED.cap, 1, -1):
        try:
            plan_round(setup, model, machine, requests)
        except CapacityError:
            continue
        yield run_round(setup, model, machine, requests, seed)
        return


def plan_round(setup: Setup, model: Footprint, machine: HardwareProfile, requests: int) -> Plan:
    """A round's plan: slots and KV tier are the report's; the draft's weights are taken off the device."""
    draft = draft_model().static if setup.speculation else 0
    options = PlanOptions(
        context=ASSUMED.depth + 2 * ASSUMED.answer,
        requests=requests,
        depth=ASSUMED.depth,
        reserve=setup.reserve + draft,
        slots=max(model.top_k, setup.resident * model.moe_layers),
        misses=setup.misses,
        kv_tier=setup.tier,
    )
    return make_plan(model, machine, options)


def run_round(
    setup: Setup,
    model: Footprint,
    machine: HardwareProfile,
    requests: int,
    seed: int = 0,
    length: int | None = None,
) -> Found:
    """Serve with so many requests. length: of drafts, None: the report's in rounds with speculation."""
    plan = plan_round(setup, model, machine, requests)
    speeds = speeds_of(machine, {node.node: len(node.cpus) for node in plan.threads}, plan.host.spread)
    proposed = (STATED.draft_length if length is None else length) if setup.speculation else 0
    speculation = Speculation(draft_model(), proposed, STATED.acceptance) if proposed else None
    routes = HabitRoutes(habits(model.experts), model.moe_layers, model.experts, model.top_k, seed)
    served = Simulator(model, speeds, plan, routes, speculation=speculation, seed=seed).serve(
        Load(requests, ASSUMED.depth, ASSUMED.answer, served=requests, prefilled=True)
    )
    return Found(requests, plan, speeds, served, peak_bytes(plan))


def peak_bytes(plan: Plan) -> int:
    """Device memory in use when the KV cache is full."""
    assert plan.device is not None
    return sum(part.nbytes for part in plan.device.parts if part.name not in ("reserve", "unused"))
