"""Hours of virtual serving on an emulated device: nothing leaks, nobody waits for ever, watermarks hold.

    python tests/backends/hybrid/soak.py --hours 4

Requests of all kinds come at random: turns of chats that begin like the turn before, prompts that fill the
context, some that are too long, empty or ask for nothing; clients leave at any time. The device is slow on
purpose (its kernels take 5 ms), so that hours pass in a few thousand steps.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybrids import FIGURES, CachedStore, options
from tiny_model import VOCAB, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.host_kernels import HostKernels
from strata.core import FinishReason, Request, SamplingParams
from strata.device.emulated import EmulatedDevice
from strata.device.figures import LinkFigures
from strata.engine.engine import Engine, EngineOptions
from strata.engine.scheduler import Work
from strata.errors import CapacityError, ContextOverflowError, RequestError
from strata.model.decoder import Decoder

SLOW = LinkFigures(bytes_per_s=1e6, latency_s=1e-3, handshake_s=5e-3)
DEVICE = replace(FIGURES, kernel_latency_s=0.005, h2d=SLOW, d2h=SLOW)
CONTEXT, PLACES, POOL, RESERVE, CHATS = 64, 10, 24, 2, 5
EVERY_SECONDS = 20.0
KINDS = {
    "chat": 35,
    "single": 20,
    "long": 10,
    "over-long": 5,
    "empty": 4,
    "nothing": 3,
    "endless": 20,
    "wrong": 5,
}
"""How many of a hundred requests are of a kind."""
PATIENCE = 60
"""Steps within which somebody must get on."""


class Soak:
    """One engine and its traffic. AssertionError as soon as something is wrong."""

    def __init__(self, seed: int, tier: str = "device") -> None:
        self.rng = random.Random(seed)
        spec = moe_spec()
        store, cpu = CachedStore(spec), CpuBackend(threads=1, activations="f32")
        self.device = EmulatedDevice(DEVICE, seed=seed)
        streamed = tier == "host"
        asked = options(store, spec, slots=8, kv_tier=tier, staged_blocks=PLACES * 4)
        self.backend = HybridBackend(self.device, HostKernels(cpu), cpu, spec, asked)
        engine = EngineOptions(
            CONTEXT, PLACES, VOCAB, page_tokens=8, kv_dtype="int8", chunk=24, max_running=6
        )
        pool = {} if streamed else {"host_pages": POOL, "reserve_pages": RESERVE}
        self.engine = Engine(Decoder(spec, store, self.backend), replace(engine, **pool))
        self._run = self.engine.executor.run
        self.engine.executor.run = self._checked_run  # type: ignore[method-assign]
        self.cpu = Engine(Decoder(spec, store, cpu), replace(engine, pages=40))
        self.chats: list[list[int]] = [[] for _ in range(CHATS)]
        self.live: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self.next_arrival = 0.0
        self.stuck = 0
        self.held = 0, 0  # allocations and bytes once everything was used

    def run(self, hours: float) -> None:
        """Serve until the device's clock says so, then until everybody has ended."""
        for kind in KINDS:
            self._arrive(kind)
        while self.device.now() < hours * 3600:
            while self.device.now() >= self.next_arrival:
                self.next_arrival += self.rng.expovariate(1 / EVERY_SECONDS)
                count = self.rng.choice((1, 1, 2, 6))
                for kind in self.rng.choices(list(KINDS), list(KINDS.values()), k=count):
                    self._arrive(kind)
            if self.rng.random() < 0.04:
                self._leave()
            if self.engine.busy:
                self._step()
            else:
                self.device.host_work({"host": max(0.0, self.next_arrival - self.device.now())})
        while self.engine.busy:
            self._step()
        self._rest()
        assert self._held() == self.held, f"{self._held()} allocations and bytes, {self.held} at first"

    # -- traffic -------------------------------------------------------------------------------------------

    def _arrive(self, kind: str) -> None:
        self.counts[kind] += 1
        try:
            request = self._make(kind)
            self.engine.add(request)
        except (RequestError, ContextOverflowError, CapacityError) as error:
            self.counts[type(error).__name__] += 1
            assert kind in ("over-long", "empty", "wrong"), f"{kind}: {error}"
            return
        assert kind not in ("over-long", "empty", "wrong"), f"{kind} was taken"
        if request.finish_reason is None:
            self.live[request.request_id] = request
        else:
            assert kind == "nothing" and request.generated == []

    def _make(self, kind: str) -> Request:
        rng, name = self.rng, f"{kind} {sum(self.counts.values())}"
        words = rng.choices(range(VOCAB), k=rng.randint(1, 12))
        answer: int | None = rng.randint(1, 10)
        if kind == "chat":
            which = rng.randrange(CHATS)
            if len(self.chats[which]) > CONTEXT - 24:
                self.chats[which] = []
            self.chats[which] = prompt = self.chats[which] + words
            return Request(name, list(prompt), SamplingParams(0.0, max_tokens=answer))
        sizes = {"long": CONTEXT - 12, "over-long": CONTEXT + rng.randint(0, 9), "empty": 0}
        prompt = rng.choices(range(VOCAB), k=sizes.get(kind, len(words)))
        if kind == "wrong":
            prompt[0] = VOCAB + 5
        answer = {"nothing": 0, "endless": None}.get(kind, answer)
        return Request(name, prompt, SamplingParams(0.0, max_tokens=answer))

    def _leave(self) -> None:
        """A client goes, or one is said to go that nobody knows."""
        name = self.rng.choice([*self.live, "nobody"])
        assert self.engine.abort(name) is (name in self.live)
        if (request := self.live.pop(name, None)) is not None:
            assert request.finish_reason is FinishReason.ABORT and not request.pages
            self.counts["abort"] += 1

    # -- steps ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self._progress()
        self.engine.step()
        self.counts["steps"] += 1
        if self.counts["steps"] == 100:
            self.held = self._held()
        self.engine.check_integrity()
        for request in [one for one in self.live.values() if one.finish_reason is not None]:
            del self.live[request.request_id]
            self._ended(request)
        self.stuck = self.stuck + 1 if self._progress() == before else 0
        assert self.stuck < PATIENCE, f"{len(self.live)} requests, and none gets on"
        if self.counts["steps"] % 200 == 0:
            self.backend.check_integrity()
            self.device.check_integrity()

    def _progress(self) -> tuple[int, int]:
        return len(self.live), sum(request.computed for request in self.live.values())

    def _checked_run(self, works: list[Work]) -> list[Any]:
        """Between scheduling and computing: the pages that move are on their way."""
        self._check_watermark()
        return self._run(works)

    def _check_watermark(self) -> None:
        tiers = self.engine.tiers
        if tiers is None:
            return
        free = tiers._places_soon
        assert free >= tiers.reserve or not tiers._idle or not tiers.host.free, "below the watermark"
        seated = [r for r in self.engine.scheduler.running if tiers.is_seated(r)]
        held = {page for request in seated for page in request.pages}
        assert len(held) <= tiers.device.total, "more pages have a seat than there are places"

    def _ended(self, request: Request) -> None:
        assert request.finish_reason is FinishReason.LENGTH and not request.pages
        limit = request.sampling.max_tokens
        room = CONTEXT - len(request.prompt)
        assert len(request.generated) == (room if limit is None else min(limit, room))
        self.counts["ended"] += 1
        if self.counts["ended"] % 8 == 0:
            alone = Request("alone", list(request.prompt), request.sampling)
            assert request.generated == list(self.cpu.generate(alone)), f"{request.request_id}: another text"
            self.counts["compared"] += 1

    # -- the end -------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Nothing is left of anybody, and expert slots have what they lent."""
        for _ in range(30):
            self.device.host_work({"host": 5.0})
            self.engine.step()
        self.engine.check_integrity()
        self.backend.check_integrity()
        pages, tiers = self.engine.pages, self.engine.tiers
        assert not self.live and pages.free == pages.unpromised == pages.total
        self.backend.memory.queue.drain()
        if tiers is not None:
            assert set(tiers._homes) == set(pages._kept) and not tiers._claims
            assert self.backend.memory.region.slots == self.backend.cache.slots == 8

    def _held(self) -> tuple[int, int]:
        live = self.device.memory.live
        return len(live), sum(allocation.nbytes for allocation in live)

    def report(self) -> str:
        """What happened."""
        text = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        tiers = self.engine.tiers
        moved = "" if tiers is None else f"; {tiers.statistics}, {self.engine.scheduler.preempted} preempted"
        return f"{self.device.now() / 3600:.2f} virtual hours: {text}{moved}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=4.0, help="on the device's clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tier", choices=("device", "host"), default="device", help="where KV pages live")
    asked = parser.parse_args()
    begin = time.perf_counter()
    soak = Soak(asked.seed, asked.tier)
    with contextlib.suppress(KeyboardInterrupt):
        soak.run(asked.hours)
    print(f"{soak.report()}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
