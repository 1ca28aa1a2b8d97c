"""Decoding in virtual time: steps cost what a function says, drafts are right as often as a list says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines import GREEDY

from strata.core import Request, SamplingParams
from strata.engine.sampler import Sampler
from strata.engine.scheduler import Work
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator

Cost = Callable[[int], float]
"""Seconds of a step by its rows."""


@dataclass
class Step:
    """What one step brought each request, and when it began and ended."""

    begin: float
    end: float
    tokens: dict[str, int]
    rows: int


@dataclass
class Drafts:
    """Proposes tokens of which `right(request, position)` says whether they are; each takes `seconds`."""

    right: Callable[[str, int], bool]
    seconds: float = 0.0
    now: float = 0.0
    name: str = "virtual"
    forgotten: list[str] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return self.seconds == 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.now += self.seconds * max(ask.count for ask in asks)
        return [Proposal(tuple(self._token(ask, i) for i in range(ask.count))) for ask in asks]

    def _token(self, ask: Ask, place: int) -> int:
        position = len(ask.request.tokens) + place
        return int(not self.right(ask.request.request_id, position))  # the true token is always 0

    def follow(self, requests: Sequence[Request]) -> None: ...

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def check_integrity(self, running: set[str]) -> None: ...


def decode(
    drafts: Drafts,
    cost: Cost,
    estimate: Cost | None,
    steps: int,
    requests: int = 1,
    lengths: LengthOptions | None = None,
) -> tuple[list[Step], Speculator]:
    """`steps` steps of `requests` requests that never end. The true continuation is zeros."""
    shape = None if estimate is None else lambda rows, **_: estimate(rows)
    speculator = Speculator(drafts, lengths or LengthOptions(), shape, lambda: drafts.now)
    sampler = Sampler(SamplingParams(temperature=0.0), 2)
    running = [Request(f"{i}", [0, 0], GREEDY) for i in range(requests)]
    done = []
    for _ in range(steps):
        begin = drafts.now
        proposed = speculator.propose([Ask(request, 16, sampler) for request in running])
        works = [_work(request, proposed.get(request.request_id, ())) for request in running]
        rows = sum(work.count for work in works)
        drafts.now += cost(rows)
        kept = [_verify(work, speculator) for work in works]
        speculator.measured(works, kept)
        tokens = {work.request.request_id: count for work, count in zip(works, kept, strict=True)}
        done.append(Step(begin, drafts.now, tokens, rows))
    return done, speculator


def _work(request: Request, draft: tuple[int, ...]) -> Work:
    start = len(request.tokens) - 1
    return Work(request, start, 1 + len(draft), True, (), draft=draft)


def _verify(work: Work, speculator: Speculator) -> int:
    accepted = next((i for i, token in enumerate(work.draft) if token), len(work.draft))
    work.request.tokens += [0] * (accepted + 1)
    speculator.verified(work, accepted)
    return accepted + 1


def slowest_window(steps: Sequence[Step], plain: float, request: str, width: int = 64) -> float:
    """The lowest speed of a request over `width` steps in a row, as a part of plain decoding's."""
    ratios = []
    for first in range(len(steps) - width + 1):
        window = steps[first : first + width]
        tokens = sum(step.tokens[request] for step in window)
        ratios.append(tokens * plain / (window[-1].end - window[0].begin))
    return min(ratios)


def speed(steps: Sequence[Step]) -> float:
    """Tokens per second of all requests."""
    return sum(sum(step.tokens.values()) for step in steps) / (steps[-1].end - steps[0].begin)
