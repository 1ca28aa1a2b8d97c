"""Plain decoding beside drafts of several lengths, on one engine, text by text, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random

from strata.core import Request, SamplingParams
from strata.engine.bench.figures import Limits
from strata.engine.best_rows import Row
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import WINDOW, Promise
from strata.engine.speculative.make import spare_for
from strata.engine.speculative.proposer import Proposer
from strata.engine.speculative.speculator import Speculator
from strata.engine.speculative.step_times import Estimate

POLICIES: tuple[tuple[str, LengthOptions | None, bool], ...] = (
    ("plain", None, False),
    ("fixed 4", LengthOptions(4, fixed=True), False),
    ("fixed 8", LengthOptions(8, fixed=True), False),
    ("dynamic", LengthOptions(), False),
    ("cost-aware", LengthOptions(), True),
)
"""Name, lengths of drafts (None: no drafts), and whether what steps cost cuts them."""
ORDER = ("fixed 4", "cost-aware", "plain", "dynamic", "fixed 8")
"""Of a round: none is far from the plain run that it is compared with."""


@dataclass(frozen=True)
class Workload:
    """A prompt and how it goes on. script: ids that are "sampled" whatever the model says; None: greedy."""

    name: str
    prompt: Sequence[int]
    script: Sequence[int] | None = None


@dataclass(frozen=True)
class SpeculativeRun:
    """One policy on one workload, once. seconds: from the first token to the last; bytes: read meanwhile.

    steps: seconds and tokens of each; same: whether the text is that of its round's plain decoding.
    proposed_by: tokens of its drafts by who proposed them, by name.
    """

    workload: str
    policy: str
    tokens: int
    seconds: float
    bytes: float
    tokens_per_forward: float
    acceptance: float
    mean_length: float
    draft_share: float
    bandwidth: float | None
    same: bool
    steps: Sequence[tuple[float, int]] = ()
    proposed_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole answer but its first token."""
        return self.tokens / self.seconds

    def slowest(self, width: int = WINDOW) -> float | None:
        """Tokens per second of the slowest `width` steps in a row; None where there were fewer."""
        times = [0.0, *accumulate(seconds for seconds, _ in self.steps)]
        tokens = [0, *accumulate(count for _, count in self.steps)]
        ends = range(width, len(times))
        return min(
            ((tokens[i] - tokens[i - width]) / (times[i] - times[i - width]) for i in ends), default=None
        )


class ScriptedTokens(Sampler):
    """Chooses what a script says. For models whose weights are random: their own text would be nothing's."""

    def __init__(self, valid_tokens: int, prompt: int, script: Sequence[int]) -> None:
        super().__init__(SamplingParams(temperature=0.0), valid_tokens)
        self._prompt, self._script = prompt, script

    def drawing(self, count: int) -> None:
        """No device knows this choice."""

    def sample(self, logits: Row, tokens: Sequence[int]) -> int:
        """The script's token at this place."""
        return self._script[len(tokens) - self._prompt]


def scripted_workloads(vocabulary: int, tokens: int, seed: int = 0) -> list[Workload]:
    """repeat: 48 ids again and again; misleading: pairs that were seen before and go on in another way."""
    chosen = Random(seed)
    block = [chosen.randrange(vocabulary) for _ in range(48)]
    repeated = [block[i % 48] for i in range(96 + tokens)]
    few = block[:12]
    misleading = [chosen.choice(few) for _ in range(256 + tokens)]
    return [
        Workload("repeat (scripted)", repeated[:96], repeated[96:]),
        Workload("misleading (scripted)", misleading[:256], misleading[256:]),
    ]


class SpeculativeBench:
    """Measures on an idle engine that shares no prefixes. A policy keeps what it learnt between its runs."""

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer,
        estimate: Estimate,
        probe: Callable[[], Limits],
        promise: Promise = "request",
    ) -> None:
        self._engine, self._probe = engine, probe
        self._speculators: dict[str, Speculator | None] = {}
        for name, lengths, costs in POLICIES:
            known, spare = (estimate, spare_for(proposer)) if costs else (None, None)
            self._speculators[name] = (
                None
                if lengths is None
                else Speculator(proposer, lengths, known, time.perf_counter, promise, spare)
            )
        self._started = 0
        self._limits = Limits()

    def runs(self, workload: Workload, tokens: int, repeats: int) -> Iterator[SpeculativeRun]:
        """Every policy in turn, `repeats` times over, there and back: what changes on the machine, slowly or
        at once, meets all of them."""
        self._limits = self._probe()
        for turn in range(repeats):
            order = ORDER if turn % 2 == 0 else reversed(ORDER)
            found = [self._run(workload, name, tokens) for name in order]
            plain = next(text for run, text in found if run.policy == "plain")
            for run, text in found:
                yield replace(run, same=text == plain)

    def _run(self, workload: Workload, policy: str, tokens: int) -> tuple[SpeculativeRun, list[int]]:
        """And the text; `same` is for `runs` to say. The probe after a run is the one before the next."""
        engine, speculator = self._engine, self._speculators[policy]
        engine.speculator = speculator
        before = self._limits
        counted, proposed = _counts(speculator), _proposed(speculator)
        request, steps, read = self._decode(workload, tokens)
        after = self._limits = self._probe()
        forwards, brought, tested, accepted, lengths, verify, draft = (
            now - then for now, then in zip(_counts(speculator), counted, strict=True)
        )
        bandwidth = None
        if before.bandwidth and after.bandwidth:
            bandwidth = (before.bandwidth + after.bandwidth) / 2
        run = SpeculativeRun(
            workload=workload.name,
            policy=policy,
            tokens=len(request.generated) - 1,
            seconds=sum(seconds for seconds, _ in steps),
            bytes=read,
            tokens_per_forward=brought / forwards if forwards else 1.0,
            acceptance=accepted / tested if tested else 0.0,
            mean_length=lengths / forwards if forwards else 0.0,
            draft_share=draft / (draft + verify) if draft + verify else 0.0,
            bandwidth=bandwidth,
            same=True,
            steps=steps,
            proposed_by={
                name: count - proposed.get(name, 0)
                for name, count in _proposed(speculator).items()
                if count > proposed.get(name, 0)
            },
        )
        return run, request.generated

    def _decode(self, workload: Workload, tokens: int) -> tuple[Request, list[tuple[float, int]], float]:
        """The answered request, seconds and tokens of the steps after its first token, bytes they read."""
        engine = self._engine
        self._started += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        request = Request(f"speculation {self._started}", list(workload.prompt), sampling)
        sampler = None
        if workload.script is not None:
            sampler = ScriptedTokens(engine.options.valid_tokens, len(workload.prompt), workload.script)
        engine.add(request, sampler)
        while engine.busy and not engine.step():
            pass
        steps, known, begin = [], len(request.tokens), time.perf_counter()
        while engine.busy:
            engine.step()
            end, now = time.perf_counter(), len(request.tokens)
            steps.append((end - begin, now - known))
            begin, known = end, now
        return request, steps, engine.metrics.requests[request.request_id].decode.bytes


def _proposed(speculator: Speculator | None) -> dict[str, int]:
    return {} if speculator is None else dict(speculator.figures.proposed_by)


def _counts(speculator: Speculator | None) -> tuple[float, ...]:
    if speculator is None:
        return (0.0,) * 7
    figures = speculator.figures
    lengths = sum(length * count for length, count in enumerate(figures.lengths))
    rates = figures.forwards, figures.tokens, sum(figures.tested_at), figures.accepted, lengths
    return (*rates, figures.verify_seconds, figures.draft_seconds)
