"""The experts of one layer: hits on the device, misses fetched or computed by the CPU, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.clock import LayerClock
from strata.backends.hybrid.device_ops import DeviceOps
from strata.backends.hybrid.expert_groups import Branch, ExpertGroups, Resident
from strata.backends.hybrid.expert_stream import ExpertStream
from strata.backends.hybrid.experts_host import ExpertCall, HostShare, host_seconds
from strata.backends.hybrid.slots import SlotLoader
from strata.backends.hybrid.split import Decision, LayerMisses, Split
from strata.backends.hybrid.stream_buffers import StreamLoad
from strata.core import ExpertId
from strata.memory.expert_slots import Claim, Handle
from strata.memory.heat import Heat
from strata.memory.transfer import Priority, Transfer, TransferState


@dataclass
class FlowMetrics:
    """Experts by how they were answered, summed over layers and steps. late: were on their way already.
    fetched: into a slot; streamed: through the ring of buffers, for want of a slot or in a prompt."""

    hits: int = 0
    late: int = 0
    fetched: int = 0
    streamed: int = 0
    computed: int = 0


class LayerServed(NamedTuple):
    """How one layer's experts were answered in the latest pass, for whoever records it.

    fetched: crossed the bus for this layer, with `nbytes` each, or were on their way; seconds: the CPU's, for
    all that it computed.
    """

    hits: tuple[int, ...]
    fetched: tuple[int, ...]
    computed: tuple[int, ...]
    nbytes: int
    seconds: float = 0.0


@dataclass
class _Found:
    """What the cache has of a layer's experts; hits are in ascending order.

    arriving: on the bus. queued: have a slot, but their transfer was not issued, so that the host may still
    compute them instead. learned: experts of rows that decode, from which the cache learns.
    """

    hits: list[Handle]
    arriving: list[tuple[Handle, Transfer]]
    queued: dict[int, tuple[Handle, Transfer]]
    missed: list[int]
    learned: set[int]


@dataclass
class LayerFlow:
    """One layer between `begin` and `finish`.

    arriving: experts with a slot, held, whose bytes may not be there yet. streamed: those that get none.
    """

    call: ExpertCall
    due: int
    groups: ExpertGroups
    decision: Decision
    arriving: list[tuple[Handle, Transfer]]
    streamed: list[int]


class ExpertFlow:
    """Runs the experts of one layer after the other.

    It owns the handles of what the device may still read: `release` gives them back when the host has learned
    that everything launched so far is done.
    """

    def __init__(
        self,
        ops: DeviceOps,
        loader: SlotLoader,
        stream: ExpertStream,
        share: HostShare,
        split: Split,
        heat: Heat | None,
    ) -> None:
        self.metrics = FlowMetrics()
        self.served: dict[int, LayerServed] = {}
        self.stream = stream
        self.split = split
        self._ops = ops
        self._loader = loader
        self._share = share
        self._heat = heat
        self._clock = LayerClock(ops.device, ops.memory.compute, split)
        self._held: list[Handle] = []

    def begin(
        self,
        call: ExpertCall,
        due: int,
        active: Sequence[int] | None = None,
        branch: Branch | None = None,
    ) -> LayerFlow:
        """Decide who does what, queue the fetches, and launch the hits.

        due: the running count of the layer. active: the experts to compute, None: all that are routed to.
        branch: what the sum joins; None: it stays alone.
        """
        found = self._acquire(call, active)
        hits, late = found.hits, [handle.expert.index for handle, _ in found.arriving]
        missed = sorted([*found.missed, *found.queued])
        decision = self._decide(call, len(hits) + len(late), missed)
        groups = ExpertGroups(self._ops, call, self.split.speeds, branch)
        flow = LayerFlow(call, due, groups, decision, found.arriving, [])
        self._fetch(flow, found)
        self._loader.queue.pump()
        self._clock.start(decision, alone=not self.stream.active)
        alone = not flow.arriving and not flow.streamed
        flow.groups.run([Resident(h.expert.index, self._loader.slot(h)) for h in hits], last=alone)
        self._clock.hits_done()
        self._count(len(hits), len(late), flow)
        self.served[call.bank.layer] = LayerServed(
            tuple(handle.expert.index for handle in hits),
            (*late, *decision.fetch),
            decision.compute,
            call.bank.layout.record_bytes,
        )
        return flow

    def finish(self, flow: LayerFlow) -> Matrix:
        """The sum, f32 [rows, hidden], or what it joins: hits, then experts that arrive, then those that
        stream, then the host's share."""
        self._run_arriving(flow)
        self.stream.run(
            flow.call.bank.layer, flow.streamed, flow.due, lambda load, wanted: self._use(flow, load, wanted)
        )
        self._clock.fetched(len(flow.decision.fetch) * flow.call.bank.layout.record_bytes)
        if flow.decision.compute:
            self._compute(flow)
        return flow.groups.finish()

    def release(self) -> None:
        """The host knows that the device has finished what was launched so far."""
        for handle in self._held:
            self._loader.cache.release(handle)
        self._held.clear()
        self._clock.read()

    def _acquire(self, call: ExpertCall, active: Sequence[int] | None) -> _Found:
        """Claim what there is of the experts that the rows chose."""
        used = np.unique(call.ids) if active is None else np.intersect1d(call.ids, active)
        learned = np.intersect1d(call.ids[call.decoding], used)
        found = _Found([], [], {}, [], set(learned.tolist()))
        for experts, prefill in ((learned, False), (np.setdiff1d(used, learned), True)):
            if len(experts) == 0:
                continue
            acquired = self._loader.cache.acquire(call.bank.layer, experts.tolist(), prefill=prefill)
            self._held += acquired.handles
            found.hits += acquired.hits
            found.missed += [expert.index for expert in acquired.misses]
            for handle in acquired.loading:
                transfer = self._loader.transfer(handle.expert)
                if transfer.state is TransferState.QUEUED:
                    found.queued[handle.expert.index] = handle, transfer
                else:
                    found.arriving.append((handle, transfer))
        if self._heat is not None and found.learned:
            self._heat.add(call.bank.layer, sorted(found.learned))
        found.hits.sort(key=lambda handle: handle.expert)
        return found

    def _decide(self, call: ExpertCall, hits: int, missed: list[int]) -> Decision:
        counts = np.bincount(call.ids.reshape(-1), minlength=call.bank.count)[missed].tolist()
        loaded = frozenset(self.stream.loaded(call.bank.layer).intersection(missed))
        rows, top_k = call.ids.shape
        may_compute = call.hidden_rows is not None
        stream = self.stream
        return self.split.decide(
            LayerMisses(
                call.bank,
                rows,
                top_k,
                hits,
                missed,
                counts,
                stream.active,
                stream.base if stream.active else 0.0,
                loaded,
                may_compute,
            )
        )

    def _fetch(self, flow: LayerFlow, found: _Found) -> None:
        """Slots for what shall be fetched and may stay; the rest streams."""
        for index in flow.decision.fetch:
            expert = ExpertId(flow.call.bank.layer, index)
            if index in found.queued:
                handle, transfer = found.queued[index]
                self._loader.queue.raise_priority(transfer, Priority.NOW)
                flow.arriving.append((handle, transfer))
                continue
            may_stay = index in found.learned and not self.stream.active
            answer = self._loader.cache.admit(expert) if may_stay else None
            if isinstance(answer, Claim):
                flow.arriving.append(self._claimed(answer, flow.due))
            else:
                flow.streamed.append(index)

    def _claimed(self, claim: Claim, due: int) -> tuple[Handle, Transfer]:
        """Fetch into a slot, which is held until the device has used it."""
        transfer = self._loader.load(claim, Priority.NOW, due)
        handle = self._loader.cache.hold(claim.expert)
        assert handle is not None, "a slot was claimed for it a moment ago"
        self._held.append(handle)
        return handle, transfer

    def _run_arriving(self, flow: LayerFlow) -> None:
        """One launch for all that have a slot and whose bytes are not known to be there."""
        flow.arriving.sort(key=lambda pair: pair[0].expert)
        for _, transfer in flow.arriving:
            self._loader.queue.wait(self._ops.memory.compute, transfer)
        arrived = [Resident(h.expert.index, self._loader.slot(h)) for h, _ in flow.arriving]
        flow.groups.run(arrived, last=not flow.streamed)

    def _use(self, flow: LayerFlow, load: StreamLoad, wanted: list[int]) -> None:
        self.stream.buffers.wait(load)
        records = {expert.index: record for expert, record in zip(load.experts, load.records, strict=True)}
        flow.groups.run([Resident(index, records[index]) for index in wanted])
        self.stream.buffers.release(load)

    def _compute(self, flow: LayerFlow) -> None:
        """The CPU's share, while the device does what was launched."""
        call, experts = flow.call, list(flow.decision.compute)
        result, seconds = self._share.compute(call, experts)
        planned = host_seconds(self.split.speeds, call.bank, len(experts), call.pairs(experts))
        self.split.host_took(planned, seconds)
        layer = call.bank.layer
        self.served[layer] = self.served[layer]._replace(seconds=seconds)
        flow.groups.join(result)

    def _count(self, hits: int, late: int, flow: LayerFlow) -> None:
        metrics = self.metrics
        metrics.hits += hits
        metrics.late += late
        metrics.fetched += len(flow.arriving) - late
        metrics.streamed += len(flow.streamed)
        metrics.computed += len(flow.decision.compute)
