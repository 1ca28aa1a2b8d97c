"""A long prompt beside requests that decode: their pace, in virtual time, under costs of many shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core import Request, SamplingParams
from strata.engine.prefill_share import LEAST, SLOWDOWN, PrefillShare
from strata.engine.scheduler import Scheduler
from strata.memory.kv_pages import KvPages

PROMPT, CHUNK, CONTEXT = 2000, 512, 4096
Cost = Callable[[int, int], float]
"""Seconds of a step: of the requests that decode, and of the prompt tokens beside them."""


class VirtualRun:
    """The scheduler and the measurements of its steps, without a model."""

    def __init__(self, cost: Cost, share: PrefillShare) -> None:
        self.cost, self.share = cost, share
        self.scheduler = Scheduler(KvPages(4000, 32), CONTEXT, CHUNK, 16, budget=share.tokens)

    def add(self, name: str, prompt: int) -> Request:
        request = Request(name, [ord(name[0]), *range(1, prompt)], SamplingParams(max_tokens=2000))
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[float, int]:
        """Seconds of the next step, and its prompt tokens."""
        works = self.scheduler.schedule()
        prompt = sum(work.count for work in works if work.is_prefill)
        seconds = self.cost(sum(not work.is_prefill for work in works), prompt)
        for work in works:
            work.request.computed += work.count
            if work.completes:
                work.request.tokens.append(1)
        self.share.measured(works, seconds)
        return seconds, prompt


def slowest(run: VirtualRun, decoding: int, allowance: int) -> float:
    """How many times a step takes at most while the long prompt is computed, after `allowance` steps."""
    for index in range(decoding):
        run.add(f"{chr(65 + index)}", 8)
    run.step()
    alone = max(run.step()[0] for _ in range(3))
    long = run.add("long", PROMPT)
    steps = []
    while long.computed < PROMPT:
        seconds, prompt = run.step()
        assert prompt >= min(LEAST, PROMPT - long.computed + prompt), "the prompt stands still"
        if prompt > LEAST:
            steps.append(seconds / alone)
    return max(steps[allowance:], default=0.0)


@settings(max_examples=60, deadline=None)
@given(
    decoding=st.integers(1, 15),
    base=st.floats(0.001, 0.1),
    per_request=st.floats(0.0, 0.02),
    per_token=st.floats(1e-5, 0.01),
)
def test_a_long_prompt_does_not_slow_down_the_others_beyond_the_factor(
    decoding: int, base: float, per_request: float, per_token: float
) -> None:
    def cost(running: int, prompt: int) -> float:
        return base + per_request * running + per_token * prompt

    run = VirtualRun(cost, PrefillShare(CHUNK, base + per_request, per_token))
    assert slowest(run, decoding, allowance=0) <= SLOWDOWN * 1.01


@pytest.mark.parametrize("power", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0, None])
def test_costs_that_were_predicted_wrongly_are_learned(power: float, wrong: float | None) -> None:
    """Experts make the first tokens of a chunk dearer than the last. Three steps may be too long."""

    def cost(running: int, prompt: int) -> float:
        return 0.02 + 0.001 * running + 0.004 * float(prompt) ** power

    share = PrefillShare(CHUNK) if wrong is None else PrefillShare(CHUNK, 0.02 * wrong, 0.004 / wrong)
    assert slowest(VirtualRun(cost, share), 4, allowance=3) <= SLOWDOWN * 1.25


def test_alone_a_prompt_takes_whole_chunks() -> None:
    run = VirtualRun(lambda running, prompt: 1.0 * prompt + 0.001, PrefillShare(CHUNK, 0.001, 1.0))
    run.add("long", PROMPT)
    assert [run.step()[1] for _ in range(4)] == [CHUNK, CHUNK, CHUNK, PROMPT - 3 * CHUNK]
