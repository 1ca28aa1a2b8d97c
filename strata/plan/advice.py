"""What to change to go faster: each change is planned and predicted like the plan itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata.config.units import format_size
from strata.errors import CapacityError, ConfigError
from strata.hardware.profile import HardwareProfile, Rate
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import Advice, Plan
from strata.plan.planner import make_plan

GIB = 1 << 30
_WORTH = 1.03
"""Smaller gains drown in what the model does not know."""
_HARM = 0.97
_MOST = 8
_LONGEST_CHUNK = 8192
_SHORTEST_CONTEXT = 4096


@dataclass(frozen=True)
class _Change:
    """One thing that could be different."""

    text: str
    model: Footprint
    hardware: HardwareProfile
    options: PlanOptions


def advise(
    plan: Plan,
    model: Footprint,
    hardware: HardwareProfile,
    options: PlanOptions,
    formats: Mapping[str, Footprint],
) -> Plan:
    """The plan with advice, greatest gain first. formats: the model in other formats, by change.

    Changes are compared at the plan's depth. Those that gain less than 3 % of decoding and of prefill, or
    cost as much of either, are left out.
    """
    now = _rates(plan)
    same_depth = dataclasses.replace(options, depth=plan.predictions[0].depth)
    found = []
    changes = _Changes(plan, model, hardware, same_depth)
    for change in (*changes.formats(formats), *changes.options(), *changes.machine()):
        try:
            then = _rates(make_plan(change.model, change.hardware, change.options))
        except (CapacityError, ConfigError):
            continue
        decode, prefill = then[0] / now[0], then[1] / now[1]
        if max(decode, prefill) >= _WORTH and min(decode, prefill) >= _HARM:
            found.append(Advice(change.text, decode, prefill))
    found.sort(key=lambda entry: -max(entry.decode, entry.prefill))
    return dataclasses.replace(plan, advice=tuple(found[:_MOST]))


def _rates(plan: Plan) -> tuple[float, float]:
    """Decoding by all requests at the plan's depth, and prefill."""
    depth = plan.predictions[0].depth
    decode = [p for p in plan.predictions if p.name == "decode" and p.depth == depth]
    prefill = next(p for p in plan.predictions if p.name == "prefill")
    return decode[-1].tokens_per_second, prefill.tokens_per_second


class _Changes:
    def __init__(self, plan: Plan, model: Footprint, hardware: HardwareProfile, options: PlanOptions) -> None:
        self.plan, self.model, self.hardware, self.asked = plan, model, hardware, options

    def _asked(self, text: str, **values: object) -> _Change:
        changed = dataclasses.replace(self.asked, **values)  # type: ignore[arg-type]
        return _Change(text, self.model, self.hardware, changed)

    def formats(self, formats: Mapping[str, Footprint]) -> Iterator[_Change]:
        """Other weight and KV formats."""
        for text, model in formats.items():
            yield _Change(text, model, self.hardware, self.asked)

    def options(self) -> Iterator[_Change]:
        """What the configuration could say."""
        plan, asked = self.plan, self.asked
        if self.hardware.device and not asked.device:
            yield self._asked("device.use: auto", device=True)
        if plan.device and asked.reserve > GIB:
            yield self._asked("device.reserve: 1GiB (long prompts then meet less room)", reserve=GIB)
        if plan.device and asked.device_memory is not None:
            yield self._asked("device.memory: auto", device_memory=None)
        if asked.slots is not None:
            yield self._asked("experts.slots: auto", slots=None)
        if asked.misses != "auto":
            yield self._asked("experts.misses: auto", misses="auto")
        if asked.kv_tier is not None:
            yield self._asked("kv.tier: auto", kv_tier=None)
        if asked.spread is not None:
            yield self._asked("host.numa: auto", spread=None)
        for entry in plan.host.spreads if plan.host.spread == "interleave" else ():
            if not entry.problem and entry.spread != "interleave":
                yield self._asked(f"host.numa: {entry.spread}", spread=entry.spread)
        if asked.threads is not None:
            yield self._asked("backend.threads: auto", threads=None)
        for part in (2, 4):
            shorter = plan.kv.context // part // 1024 * 1024
            if shorter >= _SHORTEST_CONTEXT:
                yield self._asked(f"model.context: {shorter}", context=shorter)
        for times in (2, 4, 8):
            if asked.chunk * times <= min(_LONGEST_CHUNK, plan.kv.context):
                yield self._asked(f"engine.prefill_chunk: {asked.chunk * times}", chunk=asked.chunk * times)

    def machine(self) -> Iterator[_Change]:
        """What the machine could have."""
        if self.plan.host.disk_bytes:
            more = -(-self.plan.host.disk_bytes // (16 * GIB)) * 16 * GIB
            yield _Change(f"{format_size(more)} more host memory", self.model, self._memory(more), self.asked)
        device = self.hardware.device
        if self.plan.device and device and device.link and device.link.width < 16:
            times = 16 / device.link.width
            ways = (Rate(way.value * times, "assumed") for way in (device.to_device, device.to_host))
            wider = dataclasses.replace(device, to_device=next(ways), to_host=next(ways))
            wide = dataclasses.replace(self.hardware, device=wider)
            yield _Change("the card in a slot of 16 lanes", self.model, wide, self.asked)

    def _memory(self, more: int) -> HardwareProfile:
        """The machine with `more` bytes, spread over its usable nodes."""
        found = self.hardware
        usable = sum(node.usable for node in found.nodes)
        nodes = tuple(
            dataclasses.replace(node, memory=node.memory + node.usable * more // usable)
            for node in found.nodes
        )
        limit = None if found.memory_limit is None else found.memory_limit + more
        return dataclasses.replace(found, nodes=nodes, available=found.available + more, memory_limit=limit)
