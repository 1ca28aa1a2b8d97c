"""Footprint + hardware + options -> Plan: what fits where, and how fast it will be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from strata.errors import CapacityError
from strata.hardware.profile import HardwareProfile
from strata.plan.cost import Placement, Step, StepCost, step_cost
from strata.plan.device import cut, device_memory, staging_bytes
from strata.plan.footprint import Footprint
from strata.plan.host import HostMemory, host_memory, plan_host
from strata.plan.kv import AUTO_KV_SHARE, KvNeed, KvSize, auto_budget, check_context, kv_size
from strata.plan.nodes import choose_nodes
from strata.plan.options import PlanOptions, Tier
from strata.plan.plan import DevicePlan, DraftPlan, HostPlan, KvPlan, NodeThreads, Part, Plan, Prediction
from strata.plan.routing import UNIFORM, HitCurve, published_curve
from strata.plan.speeds import Speeds, speeds_of

DEPTH = 4096
"""Tokens of context at which speeds are predicted when nothing else is asked."""


def make_plan(model: Footprint, hardware: HardwareProfile, options: PlanOptions) -> Plan:
    """The fastest plan that fits.

    With a device, KV pages go where decoding `requests` requests is predicted to be faster. A device that
    cannot hold what every token needs stays idle, and a note says so with both numbers, unless something was
    asked for that only a device can give.
    Raises CapacityError when the host's memory is too small or what was asked for does not fit; ConfigError
    for a context beyond the model's.
    """
    check_context(_need(model), options.context)
    planner = _Planner(model, hardware, options)
    drafts, refusals = [], []
    for tier in planner.tiers():
        try:
            drafts.append(planner.on_device(tier))
        except CapacityError as error:
            refusals.append(error)
    if refusals and not drafts and planner.insists():
        raise refusals[0]
    idle = [f"the device stays idle: {error.cause} ({error.remedy})" for error in refusals[:1] if not drafts]
    best = max(drafts or [planner.on_host()], key=planner.decode_rate)
    return planner.finish(best, idle)


def _need(model: Footprint, beside: int = 0) -> KvNeed:
    """beside: bytes of the draft's page that every page of the model needs in the same memory."""
    return KvNeed(model.name, model.context, model.page_tokens, model.page_bytes + beside)


@dataclass(frozen=True)
class _Draft:
    """One way to lay things out. device None: the host computes everything."""

    device: DevicePlan | None
    host: HostPlan
    kv: KvPlan


class _Planner:
    """Holds what one call of make_plan works on."""

    def __init__(self, model: Footprint, hardware: HardwareProfile, options: PlanOptions) -> None:
        self.choice = choose_nodes(hardware, options)
        self.model, self.hardware, self.options = model, self.choice.hardware, options
        self.curve = published_curve(model.experts) if model.moe_layers else UNIFORM

    def tiers(self) -> tuple[Tier, ...]:
        """Where KV pages could be, with a device."""
        if self.hardware.device is None or not self.options.device:
            return ()
        return ("device", "host") if self.options.kv_tier is None else (self.options.kv_tier,)

    def insists(self) -> bool:
        """Whether something was asked for that only a device can give."""
        asked = self.options
        return asked.slots is not None or asked.workspace is not None or asked.kv_tier == "device"

    def on_device(self, tier: Tier) -> _Draft:
        """What tokens share on the device, KV pages there or at the host; expert slots get the rest."""
        assert self.hardware.device is not None
        model, options = self.model, self.options
        # Only the device's speeds and the bus's count here, whichever way experts lie over the nodes.
        speeds = speeds_of(self.hardware, {}, "interleave")
        memory = device_memory(model, self.hardware.device.memory, options, speeds)
        room = memory.room - memory.least_slots * model.expert_bytes
        host = host_memory(model, self.hardware, options, on_device=True)
        if tier == "device":
            share = AUTO_KV_SHARE if options.context is None else 1.0
            kv = self._kv("device", int(room * share))
            part = Part("KV pages", kv.nbytes, f"{kv.pages} of {kv.page_tokens} tokens, {kv.dtype}")
            at_host = self._host(host, 0, kv)
            return _Draft(cut(model, memory, options, part, kv.nbytes), at_host, kv)
        budget = self._host_budget(host, model.expert_total)
        staged = room // staging_bytes(model, model.page_tokens, 1) * model.page_bytes
        kv = self._kv("host", min(budget, staged))
        part = Part("KV staging", staging_bytes(model, kv.context, options.requests), "two layers at a time")
        at_host = self._host(host, kv.nbytes, kv)
        return _Draft(cut(model, memory, options, part, 0), at_host, kv)

    def on_host(self) -> _Draft:
        """Everything at the host."""
        options = self.options
        host = host_memory(self.model, self.hardware, options, on_device=False)
        kv = self._kv("host", self._host_budget(host, self.model.total))
        return _Draft(None, self._host(host, kv.nbytes, kv), kv)

    def _host(self, memory: HostMemory, kv_bytes: int, kv: KvPlan) -> HostPlan:
        draft = self._draft(kv, memory.room - kv_bytes)
        counts, draft_bytes = self.choice.counts, draft.nbytes if draft else 0
        return plan_host(self.model, self.hardware, self.options, memory, kv_bytes, counts, draft_bytes)

    def _draft(self, kv: KvPlan, room: int) -> DraftPlan | None:
        """The draft's KV: as many requests with as much context, as far as it was made for that."""
        draft = self.options.draft
        if draft is None:
            return None
        context = min(kv.context, draft.context)
        pages = draft.pages(context, kv.requests)
        if pages * draft.page_bytes > room:
            context = pages = 0
        nbytes = pages * draft.page_bytes
        alone = len(self.choice.nodes) > 1 and not draft.further  # such a layer is as large as the model's
        cpus = self.choice.threads[self.choice.nodes[0]] if alone else ()
        return DraftPlan(draft.name, draft.total, context, kv.page_tokens, pages, nbytes, cpus)

    def _draft_of(self, host: HostPlan, kv: KvPlan) -> DraftPlan | None:
        """The same, by what the host's plan has for it."""
        return self._draft(kv, sum(part.nbytes for part in host.parts if part.name == "draft KV"))

    def _host_budget(self, host: HostMemory, weights: int) -> int:
        """Bytes of host memory for KV: the same as a run without a device takes."""
        if self.options.kv_bytes is not None:
            return host.room
        return min(host.room, auto_budget(host.total, weights))

    def _kv(self, tier: Tier, budget: int) -> KvPlan:
        model, options = self.model, self.options
        limit = budget if options.kv_bytes is None else min(budget, options.kv_bytes)
        beside = options.draft.page_bytes if options.draft and tier == "host" else 0
        size: KvSize = kv_size(_need(model, beside), options.context, max(0, limit), options.requests)
        nbytes = size.pages * model.page_bytes
        return KvPlan(
            tier, model.kv_dtype, size.context, options.requests, model.page_tokens, size.pages, nbytes
        )

    def decode_rate(self, draft: _Draft) -> float:
        """Tokens per second of all requests together, at the asked depth."""
        return self._cost(draft, Step.decode(self.options.requests, self._depth(draft)), self.curve).rate

    def _depth(self, draft: _Draft) -> int:
        asked = self.options.depth
        return min(draft.kv.context - 1, DEPTH if asked is None else asked)

    def _speeds(self, draft: _Draft) -> Speeds:
        return speeds_of(self.hardware, self.choice.counts, draft.host.spread)

    def _cost(self, draft: _Draft, step: Step, curve: HitCurve) -> StepCost:
        """Of a step, with as many expert slots as the KV pages in use leave."""
        device, on_device = draft.device, draft.kv.tier == "device"
        used = (
            self.model.pages(step.depth + step.tokens // step.sequences, step.sequences) if on_device else 0
        )
        slots = device.slots_beside(used * self.model.page_bytes) if device else 0
        place = Placement(device is not None, slots, on_device, draft.host.in_memory, self.options.misses)
        return step_cost(self.model, self._speeds(draft), place, step, curve)

    def finish(self, draft: _Draft, notes: list[str]) -> Plan:
        """The draft as a Plan, with predictions."""
        disk = draft.host.disk_bytes
        if disk:
            notes = [*notes, f"{disk} bytes of experts do not fit into memory and are read from disk"]
        return Plan(
            model=self.model.name,
            machine=self.hardware.name,
            experts=self.model.expert_count,
            device=draft.device,
            host=draft.host,
            kv=draft.kv,
            draft=self._draft_of(draft.host, draft.kv),
            misses=self.options.misses if draft.device else "cpu",
            chunk=self.options.chunk,
            running=self.options.running,
            threads=tuple(NodeThreads(node, cpus) for node, cpus in self.choice.threads.items() if cpus),
            bind=self.choice.bind,
            predictions=tuple(self._predictions(draft)),
            routing=self.curve.source if self.model.moe_layers else "",
            notes=(*self.hardware.warnings, *self.model.notes, *notes),
            warnings=self.choice.warnings,
            nodes=self.choice.nodes,
        )

    def _predictions(self, draft: _Draft) -> Iterator[Prediction]:
        depth, most, requests = self._depth(draft), draft.kv.context - 1, self.options.requests
        for count, at in dict.fromkeys(((1, depth), (requests, depth), (requests, most))):
            yield self._predict("decode", draft, Step.decode(count, at), at)
        prompt = max(1, depth)
        step = Step.prefill(min(self.options.chunk, prompt), prompt // 2)
        yield self._predict("prefill", draft, step, prompt)

    def _predict(
        self, name: Literal["decode", "prefill"], draft: _Draft, step: Step, depth: int
    ) -> Prediction:
        likely, floor = (self._cost(draft, step, curve) for curve in (self.curve, UNIFORM))
        hits = 1 - likely.misses / likely.distinct if likely.distinct else 1.0
        return Prediction(
            name=name,
            requests=step.sequences,
            depth=depth,
            tokens_per_second=likely.rate,
            floor=floor.rate,
            bottleneck=likely.bottleneck,
            busy={lane: seconds / likely.seconds for lane, seconds in likely.busy.items() if seconds},
            hit_rate=hits,
        )
