"""Decoding in virtual time: steps cost what a function says, drafts are right as often as a list says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from strata.core import Request, SamplingParams
from strata.engine.metrics import Phase
from strata.engine.sampler import Sampler
from strata.engine.scheduler import Work
from strata.engine.speculative.confidence import band
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import Promise
from strata.engine.speculative.proposer import Ask, Proposal
from strata.engine.speculative.speculator import Speculator

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None)
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
    """Proposes tokens of which `right(request, position)` says whether they are; each takes `seconds`, one
    that is read `reading`."""

    right: Callable[[str, int], bool]
    seconds: float = 0.0
    reading: float = 0.0
    now: float = 0.0
    name: str = "virtual"
    known: dict[str, int] = field(default_factory=dict)
    follows: bool = False

    free: bool = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.seconds == 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        trusts: list[list[int]] = [[] for _ in asks]
        going = list(range(len(asks)))
        while going:
            self.now += self.seconds
            for i in going:
                trusts[i].append(self.trust(asks[i].request, len(trusts[i])))
            going = [i for i in going if len(trusts[i]) < asks[i].count and _more(asks[i], trusts[i])]
        for ask, drafted in zip(asks, trusts, strict=True):
            self.known[ask.request.request_id] = len(ask.request.tokens) - 1 + len(drafted) - 1
        return [
            Proposal(tuple(self._token(ask, i) for i in range(len(drafted))), tuple(drafted))
            for ask, drafted in zip(asks, trusts, strict=True)
        ]

    def trust(self, request: Request, place: int) -> int:
        """How sure the draft model is of its guess: always the same, which says nothing."""
        return 4

    def _token(self, ask: Ask, place: int) -> int:
        position = len(ask.request.tokens) + place
        return int(not self.right(ask.request.request_id, position))  # the true token is always 0

    def behind(self, request: Request) -> int | None:
        name, last = request.request_id, len(request.tokens) - 1
        self.known[name] = min(last, self.known.get(name, 0))  # of its guesses, those that were right
        return last - self.known[name]

    def read(self, request: Request, count: int) -> None:
        self.now += self.reading * count
        self.known[request.request_id] = self.known.get(request.request_id, 0) + count

    def glance(self, request: Request) -> int:
        return 0

    def follow(self, works: Sequence[Work], kept: Sequence[int]) -> None: ...

    def forget(self, request_id: str) -> None:
        self.known.pop(request_id, None)

    def check_integrity(self, running: set[str]) -> None: ...


def _more(ask: Ask, trusts: Sequence[int]) -> bool:
    return ask.more is None or ask.more(trusts)


@dataclass
class Sure(Drafts):
    """Knows how often it is right: `chances` has that of each position."""

    chances: Sequence[float] = ()

    def trust(self, request: Request, place: int) -> int:
        return band(self.chances[(len(request.tokens) + place) % len(self.chances)])


class Matches(Drafts):
    """Costs nothing and trusts like n-grams: by how many proposals before were right."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [
            Proposal(tuple(self._token(ask, i) for i in range(ask.count)), self._trusts(ask)) for ask in asks
        ]

    def _trusts(self, ask: Ask) -> tuple[int, ...]:
        run = self._run(ask.request)
        return tuple(min(run + place, 16).bit_length() for place in range(ask.count))

    def glance(self, request: Request) -> int:
        return self._run(request).bit_length()

    def _run(self, request: Request) -> int:
        name, position = request.request_id, len(request.tokens)
        return next(run for run in range(17) if run == 16 or not self.right(name, position - 1 - run))


def decode(
    drafts: Drafts,
    cost: Cost,
    estimate: Cost | None,
    steps: int,
    requests: int = 1,
    lengths: LengthOptions | None = None,
    promise: Promise = "request",
    spare: Drafts | None = None,
    prompt: int = 2,
    speculator: Speculator | None = None,
    thinking: float = 0.0,
    sampling: SamplingParams = ENDLESS,
) -> tuple[list[Step], Speculator]:
    """`steps` steps of `requests` requests that never end. The true continuation is zeros.

    speculator: of requests before, which are forgotten. thinking: seconds that asking takes in a step,
    whatever comes of it.
    """
    shape = None if estimate is None else lambda rows, **_: estimate(rows)
    asked = lengths or LengthOptions()
    speculator = speculator or Speculator(drafts, asked, shape, lambda: drafts.now, promise, spare)
    sampler = Sampler(SamplingParams(temperature=0.0), 2)
    running = [Request(f"{i}", [0] * prompt, sampling) for i in range(requests)]
    for request in running:
        request.tokens.append(0)  # the prompt's step sampled it
        request.computed = prompt
    done, decoded = list[Step](), Phase()
    for _ in range(steps):
        begin = drafts.now
        proposed: dict[str, tuple[int, ...]] = {}
        if not speculator.rests(running, decoded):
            drafts.now += thinking
            proposed = speculator.propose([Ask(request, 16, sampler) for request in running])
        works = [_work(request, proposed.get(request.request_id, ())) for request in running]
        rows = sum(work.count for work in works)
        drafts.now += cost(rows)
        kept = [_verify(work, speculator) for work in works]
        decoded.add(sum(kept), drafts.now - begin, 0.0)
        if speculator.asked:
            speculator.measured(works, kept)
        tokens = {work.request.request_id: count for work, count in zip(works, kept, strict=True)}
        done.append(Step(begin, drafts.now, tokens, rows))
    for request in running:
        speculator.forget(request.request_id)
    return done, speculator


def _work(request: Request, draft: tuple[int, ...]) -> Work:
    start = len(request.tokens) - 1
    return Work(request, start, 1 + len(draft), True, (), draft=draft)


def _verify(work: Work, speculator: Speculator) -> int:
    accepted = next((i for i, token in enumerate(work.draft) if token), len(work.draft))
    work.request.tokens += [0] * (accepted + 1)
    if speculator.asked:
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


def runs(right: int, wrong: int, seed: int = 6, tokens: int = 6000) -> list[bool]:
    """A text whose drafts are right and wrong in turns, for so many tokens on average."""
    chosen, text = random.Random(seed), list[bool]()
    while len(text) < tokens:
        text += [True] * int(chosen.expovariate(1 / right) + 1)
        text += [False] * int(chosen.expovariate(1 / wrong) + 1)
    return text


def coins(rate: float, seed: int = 5, tokens: int = 6000) -> list[bool]:
    """A text whose drafts are right with the same chance everywhere."""
    chosen = random.Random(seed)
    return [chosen.random() < rate for _ in range(tokens)]


def changes(seed: int = 7, tokens: int = 6000) -> list[bool]:
    """A text that becomes another one again and again: stretches of 30 to 300 tokens."""
    chosen, text = random.Random(seed), list[bool]()
    while len(text) < tokens:
        rate = chosen.choice((0.0, 0.1, 0.5, 0.8, 0.95, 1.0))
        text += [chosen.random() < rate for _ in range(chosen.choice((30, 100, 300)))]
    return text


# Steps with drafts of 0, 1, ..., 8, then 10, 12, 14, 16 tokens that are all wrong, in plain steps: the
# fastest tenth, two cores of an Intel Xeon of the fifth generation (AVX-512, one also with AVX2), 2026-11-30.
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_MEASURED = {
    "demo": (1, 1.40, 1.66, 1.88, 2.12, 2.40, 2.53, 2.74, 2.93, 3.25, 3.63, 4.10, 4.36),
    "SmolLM2": (1, 1.13, 1.31, 1.52, 1.90, 2.03, 2.20, 2.38, 2.59, 2.90, 3.29, 3.65, 4.02),
    "SmolLM2, AVX2": (1, 1.23, 1.39, 1.64, 2.25, 2.43, 2.72, 2.88, 3.80, 3.80, 4.36, 4.73, 5.53),
    "random MoE": (1, 1.11, 1.21, 1.28, 1.53, 1.62, 1.68, 1.89, 1.94, 2.22, 2.34, 2.75, 3.02),
}


def measured_cost(model: str) -> Cost:
    """Plain steps by rows, of one of `_MEASURED`."""
    return lambda rows: float(np.interp(rows - 1, _LENGTHS, _MEASURED[model]))


MODELS = tuple(_MEASURED)
