"""A served workload, step by step: which experts are where is the real cache's, seconds are the cost model's.

Requests come as fast as others end, so that `requests` of them run at all times; each has a prompt, computed
in chunks beside the others' decoding as the engine's scheduler does it, and an answer. What differs from a
run: a step that holds a chunk and decoding is charged as the two one after the other, and prefill's experts
as in expectation, for they stream through buffers of their own and leave the cache alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from strata.engine.simulate.experts import ExpertTiers, StepLayers
from strata.engine.simulate.routes import Routes, Stream
from strata.engine.simulate.step_lanes import StepLanes
from strata.plan.cost import Lane, Placement, Step, StepCost, step_cost
from strata.plan.footprint import Footprint
from strata.plan.plan import Plan
from strata.plan.routing import UNIFORM
from strata.plan.speeds import Speeds


@dataclass(frozen=True)
class Load:
    """requests: at the same time. prompt, answer: tokens of each; prefilled: prompts cost nothing.

    served: requests that end while it is measured; before, `requests` others end to warm the caches.
    """

    requests: int
    prompt: int
    answer: int
    served: int
    prefilled: bool = False


@dataclass(frozen=True)
class Speculation:
    """A draft model proposes `length` tokens, each of which is accepted with the same chance."""

    draft: Footprint
    length: int
    acceptance: float


@dataclass(frozen=True)
class Served:
    """What was measured. Rates per second of simulated time, of all requests together.

    rate: answer tokens; decode_rate: of the steps' decoding alone; prefill_rate: prompt tokens of the steps'
    prefill alone, 0 without any. first_token: seconds from admission, median. busy: share of the time that
    each lane works. hit_rate: experts found on the device; distinct: experts per layer and decode step;
    inserts, fetched, from_disk, copied: experts per decode step over all layers.
    """

    rate: float
    decode_rate: float
    prefill_rate: float
    first_token: float
    busy: Mapping[Lane, float]
    hit_rate: float
    distinct: float
    inserts: float
    fetched: float
    from_disk: float
    tokens_per_step: float
    slots: int
    copied: float = 0.0

    @property
    def bottleneck(self) -> Lane:
        """The lane that works longest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


@dataclass
class _Request:
    stream: Stream
    waiting: int  # prompt tokens not computed yet
    depth: int
    left: int  # answer tokens to come
    begin: float


@dataclass
class _Count:
    """Sums since the warm-up ended."""

    tokens: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    steps: int = 0
    busy: Counter[Lane] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)


class Simulator:
    """One model on one machine by one plan. `serve` may be called once."""

    def __init__(
        self,
        model: Footprint,
        speeds: Speeds,
        plan: Plan,
        routes: Routes,
        *,
        policy: str = "lru",
        speculation: Speculation | None = None,
        lanes: StepLanes | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.speeds, self.plan = model, speeds, plan
        self.routes, self.speculation, self.lanes = routes, speculation, lanes
        self.tiers = ExpertTiers(model, plan, policy)
        self.now = 0.0
        self._random = random.Random(seed)
        self._running: deque[_Request] = deque()
        self._count = _Count()

    def serve(self, load: Load) -> Served:
        """Serve, and measure after the warm-up."""
        ended, started, begin = 0, 0, 0.0
        while ended < load.requests + load.served:
            while len(self._running) < load.requests:
                self._running.append(self._request(load, started))
                started += 1
            if ended >= load.requests and not begin:
                begin, self._count = self.now, _Count()
            ended += self._step()
        return self._served(self.now - begin)

    def _request(self, load: Load, number: int) -> _Request:
        """The first ones are at different places of their answers, as requests of a busy server are."""
        spread = load.answer * number // load.requests if number < load.requests else 0
        waiting = 0 if load.prefilled else load.prompt
        depth = load.prompt if load.prefilled else 0
        return _Request(self.routes.stream(number), waiting, depth + spread, load.answer - spread, self.now)

    def _step(self) -> int:
        """One step of the engine; how many requests ended."""
        ready = [request for request in self._running if not request.waiting]
        self._prefill()
        self._decode(ready)
        for request in ready:
            if request.left <= 0:
                self._running.remove(request)
        return sum(request.left <= 0 for request in ready)

    # -- prefill -------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        room = self.plan.chunk
        for request in self._running:
            tokens = min(request.waiting, room)
            if not tokens:
                continue
            room -= tokens
            found = self._spend(self._prefill_cost(tokens, request.depth), f"prefill {tokens}")
            self._count.prefill_tokens += tokens
            self._count.prefill_seconds += found.seconds
            request.waiting -= tokens
            request.depth += tokens
            if not request.waiting:  # its logits give the first token of the answer
                request.left -= 1
                self._count.tokens += 1
                self._count.first.append(self.now - request.begin)

    def _prefill_cost(self, tokens: int, depth: int) -> StepCost:
        return step_cost(self.model, self.speeds, self._place(), Step.prefill(tokens, depth), UNIFORM)

    # -- decoding ------------------------------------------------------------------------------------------

    def _decode(self, ready: list[_Request]) -> None:
        if not ready:
            return
        self._resize()
        proposed = self.speculation.length if self.speculation else 0
        rows = [[request.stream.peek(ahead) for ahead in range(proposed + 1)] for request in ready]
        depth = sum(request.depth for request in ready) // len(ready)
        width = len(ready) * (proposed + 1)
        step = Step(width, len(ready), depth, width)
        cost, used = self.tiers.decode(
            self.model, self.speeds, self._place(), step, [row for each in rows for row in each]
        )
        found = self._spend(cost, f"decode {width}", used.layers)
        self._count.decode_seconds += found.seconds + self._draft(len(ready), depth)
        self._count.used.update(used.counts())
        for request in ready:
            accepted = min(request.left, 1 + self._accepted(proposed))
            request.stream.advance(accepted)
            request.depth += accepted
            request.left -= accepted
            self._count.decode_tokens += accepted
            self._count.tokens += accepted
        self._count.steps += 1

    def _accepted(self, proposed: int) -> int:
        """How many of the proposed tokens stand: up to the first that does not."""
        for count in range(proposed):
            if self._random.random() >= (self.speculation.acceptance if self.speculation else 0.0):
                return count
        return proposed

    def _draft(self, sequences: int, depth: int) -> float:
        """Seconds of the draft's steps; it is dense and on the device whole, or on the host without one."""
        if self.speculation is None:
            return 0.0
        draft, on_device = self.speculation.draft, self.plan.device is not None
        place = Placement(on_device, 0, on_device, 0)
        one = step_cost(draft, self.speeds, place, Step.decode(sequences, depth), UNIFORM)
        for _ in range(self.speculation.length):
            self._spend(one, "draft")
        return self.speculation.length * one.seconds

    def _resize(self) -> None:
        """The border between slots and KV pages follows the pages in use."""
        if self.plan.device is None:
            return
        pages = sum(self.model.pages(request.depth + 1, 1) for request in self._running)
        used = pages * self.model.page_bytes if self.plan.kv.tier == "device" else 0
        self.tiers.resize(self.plan.device.slots_beside(used))

    # -- accounts ------------------------------------------------------------------------------------------

    def _place(self) -> Placement:
        plan = self.plan
        slots = self.tiers.slots
        return Placement(
            plan.device is not None, slots, plan.kv.tier == "device", plan.host.in_memory, plan.misses
        )

    def _spend(self, cost: StepCost, name: str, layers: StepLayers | None = None) -> StepCost:
        if self.lanes is not None:
            self.lanes.draw(self.now, name, cost, layers)
        self.now += cost.seconds
        self._count.busy.update(cost.busy)
        return cost

    def _served(self, seconds: float) -> Served:
        count, steps = self._count, max(1, self._count.steps)
        used, accesses = count.used, max(1, count.used["accesses"])
        return Served(
            rate=count.tokens / seconds,
            decode_rate=count.decode_tokens / count.decode_seconds,
            prefill_rate=count.prefill_tokens / count.prefill_seconds if count.prefill_seconds else 0.0,
            first_token=median(count.first) if count.first else 0.0,
            busy={lane: spent / seconds for lane, spent in count.busy.items() if spent},
            hit_rate=used["hits"] / accesses,
            distinct=accesses / steps / max(1, self.model.moe_layers),
            inserts=used["inserts"] / steps,
            copied=used["copied"] / steps,
            fetched=used["fetched"] / steps,
            from_disk=used["from_disk"] / steps,
            tokens_per_step=count.decode_tokens / steps,
            slots=self.tiers.slots,
        )
