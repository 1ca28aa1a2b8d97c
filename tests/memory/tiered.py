"""Requests over KV pages on two tiers, whose bytes say what text they were computed from.

Every token's place in a page is given a number that stands for the whole text up to it, as keys and values
would; whoever reads another number than its own text's has been given wrong bytes. Two machines hold them:
one of plain Python, where moves end as late as they may, and the emulated device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from strata.core import FinishReason, Request, SamplingParams
from strata.device.base import Buffer, Device, Launch
from strata.device.python_kernel import PythonKernel, Views
from strata.engine.scheduler import Scheduler, Work
from strata.memory.expert_cache import ExpertCache
from strata.memory.kv_border import SlotBorder
from strata.memory.kv_mover import KvMover
from strata.memory.kv_pages import KvPages
from strata.memory.kv_places import Border, PageMover
from strata.memory.kv_tiers import SPARE, KvTiers
from strata.memory.regions import DeviceRegion, RegionSizes
from strata.memory.transfer import Transfer, TransferState
from strata.memory.transfers import TransferOptions, TransferQueue

PAGE_TOKENS = 4
PAGE_BYTES = 8 * PAGE_TOKENS


def numbers(tokens: Sequence[int], first: int, last: int) -> list[int]:
    """What the tokens [first, last) of a text leave in the cache."""
    found, mixed = [], 0x9E3779B97F4A7C15
    for position, token in enumerate(tokens[:last]):
        mixed = (mixed ^ token + 1) * 0xBF58476D1CE4E5B9 % (1 << 64)
        if position >= first:
            found.append(mixed)
    return found


class Machine(Protocol):
    """What computes, and where."""

    mover: PageMover
    border: Border | None

    def run(self, works: list[Work]) -> None:
        """One step."""
        ...


class LazyMover:
    """Moves of plain Python that happen at the last moment, in order; targets are rubbish until then."""

    def __init__(self, device: list[list[int]], host: list[list[int]], rng: random.Random) -> None:
        self.device, self.host, self.rng = device, host, rng
        self.begun: dict[bool, list[tuple[Transfer, int, int]]] = {True: [], False: []}

    def move(self, device: int, host: int, outward: bool) -> Transfer:
        target = self.host[host] if outward else self.device[device]
        target[:] = [-1] * PAGE_TOKENS
        transfer = Transfer((), "d2h" if outward else "h2d", None, 0)  # type: ignore[arg-type]
        self.begun[outward].append((transfer, device, host))
        return transfer

    def cancel(self, move: Transfer) -> bool:
        if move.state is not TransferState.QUEUED:
            return False
        move.state = TransferState.CANCELLED
        for queue in self.begun.values():
            queue[:] = [one for one in queue if one[0] is not move]
        return True

    def order(self, move: Transfer) -> None:
        self.finish(move)

    def finish(self, move: Transfer) -> None:
        for outward, queue in self.begun.items():
            while any(one[0] is move for one in queue):
                self._first(outward)

    def poll(self) -> None:
        for outward, queue in self.begun.items():
            while queue and queue[0][0].state is TransferState.ISSUED and self.rng.random() < 0.5:
                self._first(outward)

    def issue(self) -> None:
        for queue in self.begun.values():
            for move, _, _ in queue:
                move.state = TransferState.ISSUED

    def is_quiet(self) -> bool:
        return True

    def _first(self, outward: bool) -> None:
        move, device, host = self.begun[outward].pop(0)
        if outward:
            self.host[host][:] = self.device[device]
        else:
            self.device[device][:] = self.host[host]
        move.state = TransferState.DONE


class PlainMachine:
    """Pages are lists of numbers."""

    border = None

    def __init__(self, device_places: int, host_places: int, rng: random.Random) -> None:
        self.device = [[0] * PAGE_TOKENS for _ in range(device_places)]
        self.host = [[0] * PAGE_TOKENS for _ in range(host_places)]
        self.mover = LazyMover(self.device, self.host, rng)

    def run(self, works: list[Work]) -> None:
        for copy in (work.copy for work in works if work.copy is not None):
            self.device[copy.target][:] = self.device[copy.source]
        for work in works:
            tokens, stop = work.request.tokens, work.start + work.count
            pages = [self.device[place] for place in work.table]
            known = [pages[i // PAGE_TOKENS][i % PAGE_TOKENS] for i in range(work.start)]
            assert known == numbers(tokens, 0, work.start), f"{work.request.request_id} reads another text"
            for i, number in enumerate(numbers(tokens, work.start, stop), work.start):
                pages[i // PAGE_TOKENS][i % PAGE_TOKENS] = number


class DeviceMachine:
    """Pages are bytes of a device region and of a pinned pool; a step is a kernel per request.

    cache: expert slots, three pages each, that share the region with the pages.
    """

    def __init__(
        self,
        device: Device,
        device_places: int,
        host_places: int,
        rng: random.Random,
        cache: ExpertCache | None,
    ) -> None:
        slots = cache.slots if cache else 0
        sizes = RegionSizes(256, slots * 768 + device_places * 256, 0, 768, PAGE_BYTES)
        self.region = DeviceRegion(device, sizes, slots)
        self.compute = device.stream("compute")
        self.queue = TransferQueue(device, TransferOptions())
        self.pool = device.host_alloc(host_places * PAGE_BYTES, "pool")
        self.mover = KvMover(device, self.queue, self.region.page, self.pool, PAGE_BYTES, self.compute)
        self.border = SlotBorder(self.region, cache, 1, lambda: None) if cache else None
        self._device = device
        # What belongs to the test is never left out (`dropped_waits`).
        self._patient = getattr(device, "_device", device)
        self._rng = rng
        self._done = device.event()

    def run(self, works: list[Work]) -> None:
        for copy in (work.copy for work in works if work.copy is not None):
            source, target = self.region.page(copy.source), self.region.page(copy.target)
            self._device.copy(target, source, self.compute)
        for work in works:
            self._launch(work)
        if self._rng.random() < 0.3:  # logits are read: the host knows that the step is over
            self._device.record(self._done, self.compute)
            self._patient.sync(self._done)
        if self._rng.random() < 0.2:
            self._device.host_work({"host": self._rng.random() * 1e-4})

    def _launch(self, work: Work) -> None:
        tokens, start, stop = tuple(work.request.tokens), work.start, work.start + work.count
        used = [self.region.page(place) for place in work.table[: -(-stop // PAGE_TOKENS)]]
        first = start // PAGE_TOKENS
        reads = used[: -(-start // PAGE_TOKENS)]

        def attend(reading: Views, writing: Views) -> None:
            known = np.concatenate([view.view(np.uint64) for view in reading]) if reading else np.zeros(0)
            assert known[:start].tolist() == numbers(tokens, 0, start), (
                f"{work.request.request_id}: other text"
            )
            for i, number in enumerate(numbers(tokens, start, stop), start):
                writing[i // PAGE_TOKENS - first].view(np.uint64)[i % PAGE_TOKENS] = number

        writes: list[Buffer] = used[first:]
        self._device.launch(
            Launch(
                PythonKernel("attention", attend), tuple(reads), tuple(writes), label=work.request.request_id
            ),
            self.compute,
        )


class Tiered:
    """A scheduler over two tiers, and the requests that it was given."""

    def __init__(
        self,
        machine: Any,
        device_places: int,
        host_places: int,
        reserve: int,
        *,
        most_places: int | None = None,
        chunk: int = 6,
        max_running: int = 5,
        context: int = 40,
    ) -> None:
        most = most_places or device_places
        self.pages = KvPages(most + host_places - SPARE, PAGE_TOKENS)
        mover, border = machine.mover, machine.border
        self.tiers = KvTiers(self.pages, device_places, host_places, reserve, mover, border)
        self.scheduler = Scheduler(self.pages, context, chunk, max_running, self.tiers, most)
        self.machine = machine
        self.requests: list[Request] = []
        self.count = 0
        self.steps = 0

    def add(self, prompt: list[int], answer: int) -> Request:
        """CapacityError or ContextOverflowError when it can never run."""
        self.count += 1
        request = Request(f"r{self.count}", prompt, SamplingParams(max_tokens=answer))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, token: int = 0) -> list[Work]:
        """Schedule, compute, sample `token`; requests that have all their tokens end."""
        self.steps += 1
        works = self.scheduler.schedule()
        self.check()
        self.machine.run(works)
        for work in works:
            request = work.request
            request.computed += work.count
            if work.completes:
                request.tokens.append(token)
            if len(request.tokens) >= self.scheduler.worst_case(request):
                self.end(request, FinishReason.LENGTH)
        return works

    def end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        self.requests.remove(request)

    def finish(self) -> None:
        """Everybody comes to an end; the oldest gets on in every step."""
        while self.requests:
            oldest = next(iter(self.scheduler.running), None)
            works = self.step()
            assert works, f"{len(self.requests)} requests, and none gets on"
            assert oldest is None or oldest is works[0].request, "the oldest waits"
        self.scheduler.schedule()
        self.check()
        assert self.pages.free == self.pages.unpromised == self.pages.total

    def check(self) -> None:
        """After a schedule: bookkeeping, seats and watermark."""
        self.pages.check_integrity()
        self.tiers.check_integrity()
        tiers = self.tiers
        for request in self.scheduler.running:
            if tiers.is_seated(request):
                assert len(tiers.table(request)) == len(request.pages)
        blank = set(self.pages._blank)
        homes = tiers._homes
        assert not blank & set(homes), "a blank page has a home"
        assert set(self.pages._kept) <= set(homes), "a kept page is nowhere"
        short = tiers._places_soon < tiers.reserve + tiers.device.borrowed
        assert not (short and tiers._idle and tiers.host.free), "idle pages stay below the watermark"
