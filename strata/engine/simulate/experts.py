"""The expert tiers of a simulated step: device slots and, for a model larger than memory, the host's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata.core import ExpertId
from strata.engine.simulate.routes import Row
from strata.memory.expert_cache import ExpertCache
from strata.memory.expert_slots import Claim
from strata.memory.experts import ExpertSpace
from strata.memory.policies import POLICIES
from strata.plan.cost import LayerCost, Placement, RoutedLayers, Step, StepCost, Usage, layer_cost, sum_up
from strata.plan.footprint import Footprint
from strata.plan.plan import Plan
from strata.plan.speeds import Speeds


@dataclass(frozen=True)
class StepExperts:
    """Experts of one decode step over all layers. inserts: copied into slots behind the computation; copied:
    missed ones that every memory node has a copy of."""

    accesses: int
    hits: int
    fetched: int
    inserts: int
    from_disk: int
    copied: int
    layers: StepLayers

    def counts(self) -> dict[str, int]:
        """The numbers by name."""
        names = ("accesses", "hits", "fetched", "inserts", "from_disk", "copied")
        return {name: getattr(self, name) for name in names}


class StepLayers(NamedTuple):
    """What `step_lanes` draws: one layer's cost, and what happened in each layer that routes."""

    cost: LayerCost
    routed: tuple[RoutedLayers, ...]


class _Found(NamedTuple):
    hits: int
    misses: list[ExpertId]
    from_disk: int
    experts: list[ExpertId]


def _fill(cache: ExpertCache, model: Footprint) -> None:
    """Start with full slots, as a server does after its warm start; which experts, the warm-up corrects."""
    for place in range(min(cache.slots, model.expert_count)):
        claim = cache.admit(ExpertId(place % model.moe_layers, place // model.moe_layers), insist=True)
        assert isinstance(claim, Claim), "a slot is free for it"
        cache.loaded(claim)


def _nearer(cost: LayerCost, speeds: Speeds, share: float) -> LayerCost:
    """With a share of the host's experts read from copies on their readers' nodes."""
    if not share or not speeds.host_near:
        return cost
    gain = share * (1 - speeds.host_read / speeds.host_near)
    return dataclasses.replace(cost, on_host=cost.on_host * (1 - gain))


class ExpertTiers:
    """The real cache and policy for the device, another one for experts in host memory where not all fit."""

    def __init__(self, model: Footprint, plan: Plan, policy: str) -> None:
        space = ExpertSpace((model.experts,) * model.moe_layers or (0,))
        slots = plan.device.slots_beside(0) if plan.device else 0
        self._device = ExpertCache(space, slots, POLICIES[policy])
        held = plan.host.in_memory
        whole = held >= model.expert_count
        self._host = None if whole else ExpertCache(space, held, POLICIES["lru"])
        for cache in filter(None, (self._device, self._host)):
            _fill(cache, model)
        self._copies = plan.host.copies
        self._used: Counter[ExpertId] = Counter()
        self._hot: frozenset[ExpertId] = frozenset()
        self._steps = 0

    @property
    def slots(self) -> int:
        """Slots on the device at the moment."""
        return self._device.slots

    def resize(self, slots: int) -> None:
        """More or fewer slots on the device."""
        if slots != self._device.slots:
            self._device.resize(slots)

    def decode(
        self, model: Footprint, speeds: Speeds, place: Placement, step: Step, rows: Sequence[Row]
    ) -> tuple[StepCost, StepExperts]:
        """One step of these rows: what it costs and what moved. The caches are left as it leaves them."""
        self._device.begin_step()
        if self._host is not None:
            self._host.begin_step()
        found = [self._layer(layer, rows) for layer in range(model.moe_layers)]
        count = max(1, len(found))
        misses = sum(len(layer.misses) for layer in found)
        distinct = misses + sum(layer.hits for layer in found)
        disk = sum(layer.from_disk for layer in found)
        copied = self._with_copies(found)
        cost = layer_cost(model, speeds, place, step, Usage(distinct / count, misses / count, disk / count))
        cost = _nearer(cost, speeds, copied / max(1, misses))
        layers = tuple(self._split(layer, cost, place) for layer in found)
        total = sum_up(model, speeds, place, step, cost, layers)
        fetched = sum(layer.fetched for layer in layers)
        inserts = self._insert(found, layers, total, cost)
        used = StepExperts(
            distinct, distinct - misses, fetched, inserts, disk, copied, StepLayers(cost, layers)
        )
        return total, used

    def _with_copies(self, found: Sequence[_Found]) -> int:
        """Misses among experts that the nodes have copies of: those used most so far, as heat would say."""
        if not self._copies:
            return 0
        copied = sum(expert in self._hot for layer in found for expert in layer.misses)
        self._used.update(expert for layer in found for expert in layer.experts)
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # after 1, 2, 4, ... steps, as restarts would have it
            self._hot = frozenset(expert for expert, _ in self._used.most_common(self._copies))
        return copied

    def _layer(self, layer: int, rows: Sequence[Row]) -> _Found:
        experts = sorted({expert for row in rows for expert in row[layer]})
        acquired = self._device.acquire(layer, experts)
        for handle in acquired.hits:
            self._device.release(handle)
        disk = self._from_disk(layer, experts, acquired.misses)
        used = [ExpertId(layer, index) for index in experts]
        return _Found(len(acquired.hits), acquired.misses, disk, used)

    def _from_disk(self, layer: int, experts: Sequence[int], misses: Sequence[ExpertId]) -> int:
        """How many of the device's misses memory does not have; it has what the device has, too."""
        if self._host is None:
            return 0
        acquired = self._host.acquire(layer, experts)
        for handle in acquired.hits:
            self._host.release(handle)
        for claim in self._host.admit_misses(choosy=False):
            self._host.loaded(claim)
        return len(set(acquired.misses) & set(misses))

    def _split(self, layer: _Found, cost: LayerCost, place: Placement) -> RoutedLayers:
        count = len(layer.misses)
        return RoutedLayers(1, layer.hits, count, cost.split(layer.hits, count, place.misses))

    def _insert(
        self, found: Sequence[_Found], layers: Sequence[RoutedLayers], total: StepCost, cost: LayerCost
    ) -> int:
        """Fetched experts stay if the policy wants them; others are copied while the bus is idle anyway.

        Returns how many were copied beside the fetched ones.
        """
        if not cost.on_bus:
            return 0
        cache, kept = self._device, 0
        for layer, split in zip(found, layers, strict=True):
            for expert in cache.policy.by_worth(layer.misses)[: split.fetched]:
                answer = cache.admit(expert)
                if isinstance(answer, Claim):
                    cache.loaded(answer)
                    kept += 1
        idle = total.seconds - total.busy["to_device"]
        cache.inserts_per_step = kept + max(0, int(idle / cost.on_bus))
        claims = cache.admit_misses()
        cache.inserts_per_step = None
        for claim in claims:
            cache.loaded(claim)
        return len(claims)
