"""Plain decoding beside drafts of several lengths, text by text, in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from strata.core import Request, SamplingParams
from strata.engine.bench.disturbances import undisturbed
from strata.engine.bench.figures import Limits
from strata.engine.bench.turns import Decoding, Step, Turns
from strata.engine.best_rows import Row
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ledger import WINDOW, Promise
from strata.engine.speculative.make import spare_for
from strata.engine.speculative.proposer import Proposer
from strata.engine.speculative.speculator import Speculator
from strata.engine.speculative.step_times import Estimate

F64 = NDArray[np.float64]
POLICIES: tuple[tuple[str, LengthOptions | None, bool], ...] = (
    ("plain", None, False),
    ("plain again", None, False),
    ("fixed 4", LengthOptions(4, fixed=True), False),
    ("fixed 8", LengthOptions(8, fixed=True), False),
    ("dynamic", LengthOptions(), False),
    ("cost-aware", LengthOptions(), True),
)
"""Name, lengths of drafts (None: no drafts), and whether what steps cost cuts them. The first one is what all
are compared with; what the second one is worth by that, which is 1, says how far the figures err."""


@dataclass(frozen=True)
class Workload:
    """A prompt and how it goes on. script: ids that are "sampled" whatever the model says; None: greedy.

    guesses: what a draft model chooses at each place of the script, and the probability that it gives to
    that, whatever it computes; None: its own.
    """

    name: str
    prompt: Sequence[int]
    script: Sequence[int] | None = None
    guesses: Sequence[tuple[int, float]] | None = None


@dataclass(frozen=True)
class SpeculativeRun:
    """One policy on one workload, once. seconds: from the first token to the last; bytes: read meanwhile.

    steps: those that the seconds are of; same: whether the text is that of its round's plain decoding.
    proposed_by: tokens of its drafts by who proposed them, by name. in_turns: beside the others of its round,
    slice by slice; else after one and before another. times: seconds of each step without disturbances, which
    nobody knows of those that took no turns.
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
    steps: Sequence[Step] = ()
    proposed_by: Mapping[str, int] = field(default_factory=dict)
    in_turns: bool = True
    times: Sequence[float] = ()

    @property
    def tokens_per_second(self) -> float:
        """Of the whole answer but its first token."""
        return self.tokens / self.seconds

    @property
    def undisturbed(self) -> float:
        """Seconds."""
        return sum(self.times)

    def slowest(self, plain: SpeculativeRun, width: int = WINDOW) -> float | None:
        """The slowest `width` steps in a row, as a part of plain decoding's speed; None: there were fewer.

        plain: of the same round; what took turns is compared with its time for the same tokens, else with
        its mean speed; disturbances do not count.
        """
        if len(self.steps) < width:
            return None
        tokens, times = self._progress()
        other = tokens * (plain.undisturbed / plain.tokens)
        if self.in_turns:
            other = np.interp(tokens, *plain._progress())
        return float(np.min((other[width:] - other[:-width]) / (times[width:] - times[:-width])))

    def _progress(self) -> tuple[F64, F64]:
        """Tokens and seconds before the first step and after each."""
        tokens = np.cumsum([0, *(step.tokens for step in self.steps)], dtype=np.float64)
        return tokens, np.cumsum([0.0, *self.times])


class ScriptedTokens(Sampler):
    """Chooses what a script says. For models whose weights are random: their own text would be nothing's.

    guesses: see `Workload`.
    """

    def __init__(
        self,
        valid_tokens: int,
        prompt: int,
        script: Sequence[int],
        guesses: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        super().__init__(SamplingParams(temperature=0.0), valid_tokens)
        self._prompt, self._script, self._guesses = prompt, script, guesses

    def drawing(self, count: int) -> None:
        """No device knows this choice."""

    def sample(self, logits: Row, tokens: Sequence[int]) -> int:
        """The script's token at this place."""
        return self._script[len(tokens) - self._prompt]

    def guess(self, logits: NDArray[np.float32], tokens: Sequence[int], number: float) -> int:
        """The script's guess; the logits become those of one to which a model gives its probability."""
        if self._guesses is None:
            return super().guess(logits, tokens, number)
        token, chance = self._guesses[len(tokens) - self._prompt]
        logits[:] = 0.0
        logits[token] = np.log(chance / (1 - chance) * (len(logits) - 1))
        return token


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


@dataclass
class _Contestant:
    """A policy and who decodes by it. counts, proposed: the speculator's figures when its text began."""

    policy: str
    speculator: Speculator | None
    engine: Engine
    counts: tuple[float, ...] = ()
    proposed: Mapping[str, int] = field(default_factory=dict)


class SpeculativeBench:
    """Measures on an idle engine that shares no prefixes. A policy keeps what it learnt between its runs.

    in_turns: with an engine for every policy, each with a KV cache as large as that one's; else all policies
    use the one engine, one after the other. proposer: has room for as many requests as there are policies.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer,
        estimate: Estimate,
        probe: Callable[[], Limits],
        promise: Promise = "request",
        *,
        in_turns: bool = True,
    ) -> None:
        self._probe, self._in_turns = probe, in_turns
        self._contestants: list[_Contestant] = []
        for name, lengths, costs in POLICIES:
            speculator = None
            if lengths is not None:
                known, spare = (estimate, spare_for(proposer)) if costs else (None, None)
                speculator = Speculator(proposer, lengths, known, time.perf_counter, promise, spare)
            own = Engine(engine.decoder, engine.options) if in_turns and self._contestants else engine
            self._contestants.append(_Contestant(name, speculator, own))
        self._turns = Turns(len(POLICIES))
        self._started = 0
        self._limits = Limits()

    def runs(self, workload: Workload, tokens: int, repeats: int) -> list[SpeculativeRun]:
        """All policies, `repeats` times over, after a round that does not count: what pays learns in it what
        steps take. The probe after a round is the one before the next."""
        self._round(workload, tokens)
        self._limits = self._probe()
        rounds = [self._round(workload, tokens) for _ in range(repeats)]
        times = [[[step.seconds for step in run.steps] for run in runs] for runs in rounds]
        if self._in_turns:
            times = undisturbed([[run.steps for run in runs] for runs in rounds])
        return [
            replace(run, times=found)
            for runs, texts in zip(rounds, times, strict=True)
            for run, found in zip(runs, texts, strict=True)
        ]

    def _round(self, workload: Workload, tokens: int) -> list[SpeculativeRun]:
        decode = self._side_by_side if self._in_turns else self._one_by_one
        found = decode(workload, tokens)
        text = found[0][0].request.generated
        return [
            self._run(contestant, workload.name, decoding, bandwidth, decoding.request.generated == text)
            for contestant, (decoding, bandwidth) in zip(self._contestants, found, strict=True)
        ]

    def _side_by_side(self, workload: Workload, tokens: int) -> list[tuple[Decoding, float | None]]:
        """Every policy's text, and the memory's bandwidth meanwhile."""
        found = [self._begin(each, workload, tokens) for each in self._contestants]
        self._turns.take(found, found[0])
        bandwidth = self._bandwidth()
        return [(each, bandwidth) for each in found]

    def _one_by_one(self, workload: Workload, tokens: int) -> list[tuple[Decoding, float | None]]:
        """What changes on the machine, slowly or at once, meets all of them, but in different rounds."""
        found: dict[int, tuple[Decoding, float | None]] = {}
        for place in self._turns.order():
            decoding = self._begin(self._contestants[place], workload, tokens)
            decoding.advance()
            found[place] = decoding, self._bandwidth()
        return [found[place] for place in sorted(found)]

    def _bandwidth(self) -> float | None:
        """Of the latest probe and a new one; None where nothing can be measured."""
        before, after = self._limits, self._probe()
        self._limits = after
        return (before.bandwidth + after.bandwidth) / 2 if before.bandwidth and after.bandwidth else None

    def _begin(self, contestant: _Contestant, workload: Workload, tokens: int) -> Decoding:
        """Computes the prompt."""
        engine, speculator = contestant.engine, contestant.speculator
        engine.speculator = speculator
        contestant.counts, contestant.proposed = _counts(speculator), _proposed(speculator)
        self._started += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        request = Request(f"speculation {self._started}", list(workload.prompt), sampling)
        sampler = None
        if workload.script is not None:
            sampler = ScriptedTokens(
                engine.options.valid_tokens, len(workload.prompt), workload.script, workload.guesses
            )
        return Decoding(engine, request, sampler)

    def _run(
        self, contestant: _Contestant, workload: str, decoding: Decoding, bandwidth: float | None, same: bool
    ) -> SpeculativeRun:
        """A text that is over."""
        speculator, engine = contestant.speculator, contestant.engine
        forwards, brought, tested, accepted, lengths, verify, draft = (
            now - then for now, then in zip(_counts(speculator), contestant.counts, strict=True)
        )
        return SpeculativeRun(
            workload=workload,
            policy=contestant.policy,
            tokens=decoding.tokens,
            seconds=sum(step.seconds for step in decoding.steps),
            bytes=engine.metrics.requests[decoding.request.request_id].decode.bytes,
            tokens_per_forward=brought / forwards if forwards else 1.0,
            acceptance=accepted / tested if tested else 0.0,
            mean_length=lengths / forwards if forwards else 0.0,
            draft_share=draft / (draft + verify) if draft + verify else 0.0,
            bandwidth=bandwidth,
            same=same,
            steps=decoding.steps,
            proposed_by=dict(Counter(_proposed(speculator)) - Counter(contestant.proposed)),
            in_turns=self._in_turns,
        )


def _proposed(speculator: Speculator | None) -> dict[str, int]:
    return {} if speculator is None else dict(speculator.figures.proposed_by)


def _counts(speculator: Speculator | None) -> tuple[float, ...]:
    if speculator is None:
        return (0.0,) * 7
    figures = speculator.figures
    lengths = sum(length * count for length, count in enumerate(figures.lengths))
    rates = figures.forwards, figures.tokens, sum(figures.tested_at), figures.accepted, lengths
    return (*rates, figures.verify_seconds, figures.draft_seconds)
