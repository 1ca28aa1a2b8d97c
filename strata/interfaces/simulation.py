"""What `strata simulate` does: a model's headers, a machine and a workload become predicted speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.config import Config
from strata.device.timeline import Timeline
from strata.engine.simulate.routes import HabitRoutes, Routes, TraceRoutes, habits
from strata.engine.simulate.server import Load, Served, Simulator
from strata.engine.simulate.step_lanes import StepLanes
from strata.errors import UsageError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.planning import model_of, plan_options
from strata.interfaces.traces import open_traces
from strata.plan.footprint import Footprint
from strata.plan.plan import Plan, Prediction
from strata.plan.planner import make_plan
from strata.plan.speeds import speeds_of


@dataclass(frozen=True)
class Workload:
    """What is asked for. requests: numbers of requests at the same time, each simulated by itself.

    trace, only: a recorded trace, and which of several it holds.
    """

    requests: Sequence[int]
    prompt: int
    answer: int
    policy: str
    trace: Path | None = None
    only: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """One number of requests: the plan that was obeyed, what was measured, and what the plan predicted."""

    requests: int
    plan: Plan
    served: Served
    predicted: Prediction
    source: str


def simulate(
    config: Config, machine: HardwareProfile, work: Workload, timeline: Path | None = None
) -> Iterator[Simulated]:
    """One result after the other. timeline: written for the first number of requests.

    Raises what `plan_model` raises, and UsageError for a trace of another model.
    """
    model = model_of(config)
    routes = _routes(model, work)
    for number, requests in enumerate(work.requests):
        plan = _plan(config, model, machine, work, requests)
        drawn = Timeline() if timeline and number == 0 else None
        served = _serve(model, machine, plan, routes, work, requests, drawn)
        if drawn is not None and timeline is not None:
            drawn.write(timeline)
        yield Simulated(requests, plan, served, _predicted(plan), routes.source)


def _plan(config: Config, model: Footprint, machine: HardwareProfile, work: Workload, requests: int) -> Plan:
    """For as many tokens as the workload has, unless the configuration asks for a context."""
    needed = work.prompt + work.answer + 1
    context = config.model.context or min(needed, model.context)
    if needed > context:
        raise UsageError(
            f"prompt and answer are {work.prompt} + {work.answer} tokens, the context holds {context}",
            remedy="lower --prompt or --answer",
        )
    depth = work.prompt + work.answer // 2
    options = dataclasses.replace(plan_options(config, depth), context=context, requests=requests)
    return make_plan(model, machine, options)


def _serve(
    model: Footprint,
    machine: HardwareProfile,
    plan: Plan,
    routes: Routes,
    work: Workload,
    requests: int,
    drawn: Timeline | None,
) -> Served:
    threads = {node.node: len(node.cpus) for node in plan.threads}
    speeds = speeds_of(machine, threads, plan.host.spread)
    lanes = StepLanes(drawn, plan) if drawn is not None else None
    simulator = Simulator(model, speeds, plan, routes, policy=work.policy, lanes=lanes, seed=work.seed)
    return simulator.serve(Load(requests, work.prompt, work.answer, served=requests))


def _predicted(plan: Plan) -> Prediction:
    """The plan's decoding of all requests at the workload's depth."""
    depth = plan.predictions[0].depth
    return [entry for entry in plan.predictions if entry.name == "decode" and entry.depth == depth][-1]


def _routes(model: Footprint, work: Workload) -> Routes:
    if work.trace is None:
        shape = model.moe_layers, max(1, model.experts), model.top_k
        return HabitRoutes(habits(model.experts), *shape, seed=work.seed)
    sources = open_traces(work.trace, work.only)
    if len(sources) > 1:
        raise UsageError(f"{work.trace} holds {len(sources)} traces", remedy="choose one with --only")
    return TraceRoutes(sources[0], model.moe_layers, model.experts, model.top_k)
