"""Every wait is needed: without any one of them a race is found or the logits are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from dropped_sites import Site, SiteDroppingDevice, calls_in_source
from hybrids import FIGURES, SPEEDS, CachedStore, Plain, make_hybrid, one_sequence, tokens
from tiny_model import moe_spec

from strata.backends.base import NO_MIN_P, DraftRows, Drawing
from strata.backends.cpu import CpuBackend
from strata.core import ExpertId
from strata.device.base import Copy, EventError, RaceError
from strata.device.emulated import EmulatedDevice
from strata.memory.expert_slots import Claim
from strata.memory.locked_pieces import LockOptions
from strata.memory.transfer import Priority
from strata.memory.transfers import TransferOptions, TransferQueue
from strata.plan.spec import ModelSpec

SEEDS = range(6)
# Calls take time, so that guesses are there before they are needed.
TIMED = replace(FIGURES, call_s=5e-6)
ROUTED = moe_spec(2, moe_layers=(True, True))
DENSE = moe_spec(2, moe_layers=(False, False))
DEEP = moe_spec(5, moe_layers=(False,) * 5)
STAGED = TransferOptions(staging_bytes=2048, speculative_bytes=8192)
SLOW_BUS, FAST_BUS = (replace(SPEEDS, to_device=speed) for speed in (1e7, 1e11))
# Single tokens are the host's, prompts stream.
PATIENT = replace(SPEEDS, host_read=1e12, host_macs=2e8, to_device=2e8)


def decode(spec: ModelSpec, sizes: tuple[int, ...], quiet: int = 0, **changes: Any) -> Callable[..., bool]:
    """A scenario: feed a model, the first `quiet` times without asking for logits; right or not."""
    store, cpu = CachedStore(spec), CpuBackend(threads=1, activations="f32")
    plain, ids = Plain.make(cpu, store, spec), tokens(sum(sizes))
    ends = np.cumsum(sizes).tolist()
    parts = [ids[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    wanted = [plain.feed(part) for part in parts]

    def run(device: Any) -> bool:
        hybrid = make_hybrid(cpu, store, spec, device=device, **changes)
        found = [hybrid.feed(part, logits=index >= quiet) for index, part in enumerate(parts)]
        hybrid.close()
        pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if f is not None]
        return all(bool(np.abs(f - w).max() < 1e-4 * w.std()) for f, w in pairs)

    return run


def both_ways(device: Any) -> bool:
    """Plain memory goes up through the two staging buffers while other bytes come down through them."""
    queue = TransferQueue(device, STAGED)
    first, second = np.random.default_rng(1).integers(0, 256, (2, 5000), dtype=np.uint8)
    target = np.zeros_like(second)
    there, beside = device.alloc(5000, "there"), device.alloc(5000, "beside")
    stream, event = device.stream("other"), device.event()
    queue.submit([Copy(beside, device.host_pageable(first, "first"))], Priority.NOW, 0)
    queue.pump()
    device.copy(there, device.host_register(second, "second"), stream)
    device.record(event, stream)
    back = device.host_pageable(target, "target")
    queue.finish(queue.submit([Copy(back, there)], Priority.NOW, 1, [event]))
    return bool((device.host_read(back) == second).all())


def copied_page(device: Any) -> bool:
    """A page at the host is copied behind a pass that may still be writing it, and serves in its stead."""
    store, cpu, ids = CachedStore(DEEP), CpuBackend(threads=1, activations="f32"), tokens(14)
    plain = Plain.make(cpu, store, DEEP)
    wanted = [plain.feed(part) for part in (ids[:12], ids[12:])][1]
    hybrid = make_hybrid(cpu, store, DEEP, device=device, kv_tier="host", staged_blocks=3)
    hybrid.feed(ids[:12], logits=False)
    hybrid.backend.copy_pages(hybrid.kv, [(int(hybrid.pages[1]), 0)])
    hybrid.pages[1] = 0
    found = hybrid.feed(ids[12:])
    hybrid.close()
    return found is not None and bool(np.abs(found - wanted).max() < 1e-4 * wanted.std())


def lent_slots(device: Any) -> bool:
    """Slots become pages between two passes, of which the first may still be running, while experts arrive
    that the second will need."""
    store, cpu, ids = CachedStore(ROUTED), CpuBackend(threads=1, activations="f32"), tokens(5)
    plain = Plain.make(cpu, store, ROUTED)
    wanted, needed = [], list[list[ExpertId]]()
    for one in ids:
        wanted.append(plain.feed([one]))
        routes = plain.decoder.routes.ids
        needed.append([ExpertId(layer, int(i)) for layer in routes for i in routes[layer][0]])
    hybrid = make_hybrid(cpu, store, ROUTED, device=device, misses="fetch", slots=6, prefetch=0.0)
    border = hybrid.kv.border
    found = []
    for count, one in enumerate(ids):
        found.append(hybrid.feed([one], logits=count > 2))
        for expert in needed[(count + 1) % len(ids)]:
            claim = hybrid.backend.cache.admit(expert)
            if isinstance(claim, Claim):
                hybrid.backend.loader.load(claim, Priority.NOW, 0)
        hybrid.backend._end()  # sends them off, as at the end of the pass
        border.widen(hybrid.backend.memory.region.pages + 1)
    hybrid.close()
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if f is not None]
    return all(bool(np.abs(f - w).max() < 1e-4 * w.std()) for f, w in pairs)


def best_logits(device: Any) -> bool:
    """The best two logits of each of two tokens, chosen where they were computed."""
    store, cpu, ids = CachedStore(DENSE), CpuBackend(threads=1, activations="f32"), tokens(6)
    plain = Plain.make(cpu, store, DENSE)
    wanted = [plain.feed(part) for part in (ids[:4], ids[4:])]
    hybrid = make_hybrid(cpu, store, DENSE, device=device)
    right = []
    for part, logits in zip((ids[:4], ids[4:]), wanted, strict=True):
        batch = one_sequence(part, hybrid.done, hybrid.pages, True)
        hybrid.done += len(part)
        best = hybrid.backend.best_logits(hybrid.decoder.forward(batch, hybrid.kv), 2, DENSE.vocab)
        right.append(best is not None and np.array_equal(best.ids, np.argsort(-logits)[:, :2]))
    hybrid.close()
    return all(right)


def verified_drafts(device: Any) -> bool:
    """Of three tokens, each with what follows it as its draft; the second draft is wrong."""
    store, cpu, ids = CachedStore(DENSE), CpuBackend(threads=1, activations="f32"), tokens(6)
    plain = Plain.make(cpu, store, DENSE)
    wanted = [plain.feed(part).argmax(axis=1).tolist() for part in (ids[:3], ids[3:])]
    hybrid = make_hybrid(cpu, store, DENSE, device=device)
    greedy, right = Drawing(0.0, 1.0, NO_MIN_P, 1, [0.0] * 3), []
    for part, next_ones, draft in zip((ids[:3], ids[3:]), wanted, ((0, 1), (0, None)), strict=True):
        batch = one_sequence(part, hybrid.done, hybrid.pages, True)
        hybrid.done += len(part)
        proposed = [next_ones[place] if place is not None else -7 for place in draft]
        rows = [DraftRows(0, proposed, greedy)]
        logits = hybrid.decoder.forward(batch, hybrid.kv)
        (found,) = hybrid.backend.verify_drafts(logits, rows, 1, DENSE.vocab)
        accepted = 2 if draft[1] is not None else 1
        right.append(found == (accepted, next_ones[accepted]))
    hybrid.close()
    return all(right)


SCENARIOS = {
    "fetched": decode(ROUTED, (1, 1, 1, 1), misses="fetch", slots=3, prefetch=0.0),
    "guessed": decode(ROUTED, (1,) * 8, misses="cpu", slots=4, prefetch=0.0, speeds=FAST_BUS),
    "streamed": decode(ROUTED, (20, 1, 20), misses="fetch", slots=2, stream_experts=1, prefetch=2.0),
    "streamed, no slots": decode(ROUTED, (20, 1, 1), misses="fetch", slots=0, stream_experts=1),
    "plain memory": decode(
        ROUTED, (20, 1, 1, 1), misses="auto", slots=4, locks=LockOptions(None), transfers=STAGED
    ),
    "computed": decode(ROUTED, (5, 1, 1, 1, 1, 1), misses="cpu", slots=3, prefetch=0.0, speeds=SLOW_BUS),
    "a prompt while experts arrive": decode(
        ROUTED, (1, 20, 1, 20), misses="auto", slots=6, stream_experts=1, prefetch=2.0, speeds=PATIENT
    ),
    "dense": decode(DENSE, (3, 7, 2, 5), quiet=3),
    "pages at the host": decode(DEEP, (3, 7, 1, 5, 1), quiet=3, kv_tier="host", staged_blocks=3),
    "a page copied at the host": copied_page,
    "lent slots": lent_slots,
    "both ways": both_ways,
    "best logits": best_logits,
    "verified drafts": verified_drafts,
}


def outcome(name: str, seed: int, dropped: Site | None) -> tuple[bool, SiteDroppingDevice]:
    device = SiteDroppingDevice(EmulatedDevice(TIMED, seed=seed), dropped)
    try:
        return SCENARIOS[name](device), device
    except (RaceError, EventError, AssertionError):
        return False, device


def noticed(site: Site, names: list[str]) -> bool:
    return any(not outcome(name, seed, site)[0] for seed in SEEDS for name in names)


def test_no_wait_can_be_left_out() -> None:
    where: dict[Site, set[str]] = {}
    for name in SCENARIOS:
        for seed in SEEDS:
            right, device = outcome(name, seed, None)
            assert right, f"{name}, seed {seed}"
            for site in device.sites:
                where.setdefault(site, set()).add(name)
    lines = {line for site in where for line in site}
    assert calls_in_source() <= lines, f"never called: {sorted(calls_in_source() - lines)}"
    missed = [site for site, names in where.items() if site and not noticed(site, sorted(names))]
    assert not missed, "\n".join(map(str, missed))
