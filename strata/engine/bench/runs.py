"""Runs the cases of a benchmark over an engine, with the memory's speed measured around every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np

from strata.backends.base import Backend
from strata.core import Request, SamplingParams
from strata.engine.bench.figures import Case, Limits, Result, Run, head_macs, macs_per_token
from strata.engine.bench.ops import OpTimer
from strata.engine.best_rows import Row
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.hardware.bandwidth import read_bandwidth
from strata.hardware.int8_peak import int8_peak

Probe = Callable[[], Limits]
PROBE_SECONDS = 0.1
"""Of reading, after touching the buffer: a few passes, of which the best counts."""


class RandomTokens(Sampler):
    """Draws every id with the same chance, whatever the logits say.

    Streams get different tokens this way. A benchmark that feeds all streams the same token, or lets them
    run into the same loop, makes them share their experts and reads far fewer bytes than real requests do.
    """

    def __init__(self, valid_tokens: int, seed: int) -> None:
        super().__init__(SamplingParams(seed=seed), valid_tokens)
        # Python's own generator: numpy's took 250 us of a step whose weights had emptied the caches.
        self._uniform = Random(seed).random

    def drawing(self, count: int) -> None:
        """No device knows this choice."""

    def sample(self, logits: Row, tokens: Sequence[int]) -> int:
        """One id below valid_tokens."""
        return int(self._uniform() * self.valid_tokens)


def limits_probe(backend: Backend) -> Probe:
    """What the backend's own threads can do now; nothing is known of backends without such threads."""
    cpu: Any = getattr(backend, "cpu", None)
    if not hasattr(cpu, "read_bandwidth"):  # a device's backend has a whole backend under that name
        return Limits
    if getattr(backend, "activations", None) not in ("int8", "int8_per_token"):
        return lambda: Limits(read_bandwidth(cpu, PROBE_SECONDS).best)
    return lambda: Limits(read_bandwidth(cpu, PROBE_SECONDS).best, int8_peak(cpu))


def tokens_needed(case: Case, chunk: int) -> int:
    """Tokens of one request's context that a case takes.

    Streams whose prompts are computed go on decoding until the last one's is: a token per step.
    """
    if case.kind == "prefill":
        return case.tokens + 1
    return case.depth + 1 + _answer_limit(case, chunk)


def _answer_limit(case: Case, chunk: int) -> int:
    """max_tokens of a decode request: never reached, for a finished request cannot be rewound."""
    filling = -(-case.streams * (case.depth + 1) // chunk)
    return max(filling, case.tokens + 1) + 1


class Bench:
    """Measures cases on one engine, which must be idle and large enough (`tokens_needed`).

    Prompts are random ids from a seed, different for every stream and repetition; generated ids are random,
    too (see RandomTokens), so choosing a token costs next to nothing. A step's time is the engine's whole
    step: scheduling, building the batch, the decoder, accounting.
    """

    def __init__(
        self,
        engine: Engine,
        probe: Probe,
        *,
        seed: int = 0,
        timer: OpTimer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self._probe = probe
        self._timer = timer
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._started = 0
        self._token_macs = macs_per_token(engine.decoder.spec)
        self._head_macs = head_macs(engine.decoder.spec)

    def warm_up(self, tokens: int) -> None:
        """Compute one prompt that does not count: weights come from disk, threads start, scratch grows."""
        self._prefill(self._request(tokens, 1))

    def measure(self, case: Case, repeats: int) -> Result:
        """Run a case `repeats` times."""
        measured = self._prefills if case.kind == "prefill" else self._decodes
        return Result(case, tuple(measured(case, repeats)))

    def _prefills(self, case: Case, repeats: int) -> list[Run]:
        runs, before = [], self._probe()
        for _ in range(repeats):
            request = self._request(case.tokens, 1)
            run = self._timed(partial(self._prefill, request), case.tokens, 1, before)
            runs.append(run)
            before = run.after
        return runs

    def _decodes(self, case: Case, repeats: int) -> list[Run]:
        """The streams' prompts are computed once; every repetition starts behind them."""
        limit = _answer_limit(case, self.engine.options.chunk)
        requests = [self._request(case.depth + 1, limit) for _ in range(case.streams)]
        try:
            while not all(request.generated for request in requests):
                self.engine.step()
            runs, before = [], self._probe()
            tokens = case.tokens * case.streams
            for _ in range(repeats):
                for request in requests:
                    _rewind(request)
                run = self._timed(partial(self._steps, case.tokens), tokens, tokens, before)
                runs.append(run)
                before = run.after
            return runs
        finally:
            for request in requests:
                self.engine.abort(request.request_id)

    def _timed(self, work: Callable[[], int], tokens: int, logit_rows: int, before: Limits) -> Run:
        """Time `work`, which returns the number of its steps."""
        total = self.engine.metrics.total
        read = total.prefill.bytes + total.decode.bytes
        if self._timer:
            self._timer.start()
        begin = self._clock()
        steps = work()
        seconds = self._clock() - begin
        ops = self._timer.stop(steps, seconds) if self._timer else None
        read = total.prefill.bytes + total.decode.bytes - read
        macs = tokens * self._token_macs + logit_rows * self._head_macs
        return Run(tokens, seconds, read, macs, before, self._probe(), ops)

    def _prefill(self, request: Request) -> int:
        steps = 0
        while request.finish_reason is None:
            self.engine.step()
            steps += 1
        return steps

    def _steps(self, count: int) -> int:
        for _ in range(count):
            self.engine.step()
        return count

    def _request(self, tokens: int, limit: int) -> Request:
        """A request with a random prompt, queued."""
        ids = self._random.integers(self.engine.options.valid_tokens, size=tokens)
        self._started += 1
        sampling = SamplingParams(max_tokens=limit)
        request = Request(f"bench-{self._started}", ids.tolist(), sampling)
        self.engine.add(request, RandomTokens(self.engine.options.valid_tokens, self._started))
        return request


def _rewind(request: Request) -> None:
    """Back to where the prompt is computed and one token is known. The pages behind are written anew."""
    del request.tokens[len(request.prompt) + 1 :]
    request.computed = len(request.prompt)
