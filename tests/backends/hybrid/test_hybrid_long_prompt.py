"""A prompt that needs more experts than there are slots, and who decodes beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hybrids import F32, CachedStore, Hybrid, make_hybrid, one_sequence, tokens
from tiny_model import EXPERT_WIDTH, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.expert_source import Loan
from strata.core import ExpertId
from strata.memory.expert_slots import Claim
from strata.memory.transfer import Priority
from strata.plan.spec import ExpertSpec, RouterSpec

SPEC = replace(moe_spec(3), experts=ExpertSpec(RouterSpec(64, 2), EXPERT_WIDTH))
STORE = CachedStore(SPEC)
EXPERTS = [ExpertId(layer, index) for layer in (1, 2) for index in range(64)]
CHUNKS = [tokens(200, seed=chunk) for chunk in (11, 12, 13)]
BOUND = 0.05
"""What the hit rate of 40 decoded tokens may lose: 8 of their 160 experts."""


class Pair:
    """Two requests on one device: one decodes the same few tokens again and again, one has a long prompt.

    crossed: how often each expert was brought to the device in each chunk of the prompt.
    """

    def __init__(self, cpu: CpuBackend, slots: int, misses: str) -> None:
        asked: dict[str, Any] = {"rows": 200, "logit_rows": 200, "blocks": 100, "stream_experts": 4}
        asked["inserts_per_step"] = None
        self.hybrid: Hybrid = make_hybrid(
            cpu, STORE, SPEC, slots=slots, misses=misses, seed=7, pages=110, prefetch=2.0, **asked
        )
        self.decoded = 0
        self.crossed: list[Counter[ExpertId]] = []
        source = self.hybrid.backend.source
        lend = source.lend

        def counted(experts: Sequence[ExpertId], *, passing: bool) -> Loan:
            if self.crossed:
                self.crossed[-1].update(experts)
            return lend(experts, passing=passing)

        source.lend = counted  # type: ignore[method-assign]

    def decode(self, count: int) -> float:
        """So many tokens of the first request; the share of their experts that had a slot."""
        counts = self.hybrid.backend.cache.statistics
        before = counts.hits, counts.misses
        for _ in range(count):
            self._pass([17 + self.decoded % 2], self.decoded, self.hybrid.pages[80:])
            self.decoded += 1
        hits, misses = counts.hits - before[0], counts.misses - before[1]
        return hits / (hits + misses)

    def bring_all(self) -> None:
        """Every expert gets a slot."""
        backend = self.hybrid.backend
        for expert in EXPERTS:
            claim = backend.cache.admit(expert, insist=True)
            if isinstance(claim, Claim):
                backend.loader.load(claim, Priority.NOW, 0)
        backend.memory.queue.drain()
        backend.loader.settle()
        assert self.resident() == set(EXPERTS)

    def resident(self) -> set[ExpertId]:
        """Experts that have a slot."""
        return {expert for expert in EXPERTS if self.hybrid.backend.loader.has(expert)}

    def prompt(self) -> list[F32]:
        """Logits of every token of the second request's prompt, chunk after chunk."""
        found, start = [], 0
        for chunk in CHUNKS:
            self.hybrid.backend.memory.queue.drain()  # what decoding inserts is not the prompt's
            self.crossed.append(Counter())
            found.append(self._pass(chunk, start, self.hybrid.pages[:80]))
            start += len(chunk)
        return found

    def _pass(self, ids: list[int], start: int, pages: Any) -> F32:
        batch = one_sequence(ids, start, pages, True)
        hybrid = self.hybrid
        logits = hybrid.decoder.forward(batch, hybrid.kv)
        assert logits is not None
        return hybrid.backend.to_numpy(logits).copy()


@pytest.mark.parametrize("misses", ["fetch", "auto"])
def test_a_prompt_that_needs_more_experts_than_there_are_slots(misses: str) -> None:
    """case-41: nothing is left out for want of a slot, nothing crosses twice, decoding keeps its experts."""
    cpu = CpuBackend(threads=1, activations="f32")
    small, whole = Pair(cpu, 12, misses), Pair(cpu, len(EXPERTS), "fetch")
    small.decode(40)
    whole.decode(1)
    whole.bring_all()
    before, kept = small.decode(40), small.resident()
    found, wanted = small.prompt(), whole.prompt()
    for chunk, (here, truth) in enumerate(zip(found, wanted, strict=True)):
        assert np.abs(here - truth).max() < 1e-4 * truth.std(), f"chunk {chunk}"
    assert not any(whole.crossed), "all were resident"
    most = [max(crossed.values(), default=0) for crossed in small.crossed]
    assert max(most) == 1, "an expert crossed twice in a chunk"
    if misses == "fetch":
        assert all(len(crossed) > 64 for crossed in small.crossed), "a chunk needs most of the 128 experts"
    assert small.resident() == kept
    after = small.decode(40)
    assert before > 0.5 and after > before - BOUND
    small.hybrid.close()
    whole.hybrid.close()
