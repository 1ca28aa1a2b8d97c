"""The step loop: schedule, execute, sample. The engine knows token ids only."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec, Verified
from strata.core import PAGE_TOKENS, FinishReason, KvDtype, Request, TokenLogprob
from strata.engine.best_rows import BestRow, Row, Rows
from strata.engine.executor import Executor
from strata.engine.logit_reader import Need, Needs
from strata.engine.metrics import Metrics, step_bytes
from strata.engine.placement import Placement
from strata.engine.prefill_share import PrefillShare
from strata.engine.sampler import Sampler, token_logprob
from strata.engine.scheduler import Scheduler, Work
from strata.engine.speculative.proposer import Ask
from strata.engine.speculative.speculator import Speculator
from strata.errors import RequestError
from strata.memory.kv_pages import KvPages
from strata.memory.kv_tiers import SPARE, KvTiers
from strata.model.decoder import Decoder
from strata.plan.options import MAX_RUNNING, MOST_LOGITS


@dataclass(frozen=True)
class EngineOptions:
    """context: tokens of prompt and answer of one request, at most. chunk: prompt tokens per step.

    pages: KV pages of page_tokens tokens each, for all requests together. valid_tokens: ids below it are
    the tokenizer's; the vocabulary's rows from there on are padding. max_running: requests per step.
    decode_seconds, token_seconds: predictions for `PrefillShare`.
    share_prefixes: what an earlier request computed is not computed again where a prompt begins the same.
    host_pages: of a pool that a device's pages can move to; reserve_pages: of `pages`, kept free while that
    helps (`memory.kv_tiers`). Only for a backend that has a device.
    """

    context: int
    pages: int
    valid_tokens: int
    page_tokens: int = PAGE_TOKENS
    kv_dtype: KvDtype = "int8"
    chunk: int = 512
    max_running: int = MAX_RUNNING
    decode_seconds: float | None = None
    token_seconds: float | None = None
    share_prefixes: bool = True
    host_pages: int = 0
    reserve_pages: int = 0

    @property
    def logit_rows(self) -> int:
        """Rows of a step whose logits may be wanted: one of everybody who runs, and drafts."""
        return max(MOST_LOGITS, self.max_running)


class Event(NamedTuple):
    """A request's progress: a new token; or None when it ended without one (stop id, error).

    logprob: the token's, where the request asked for it. finish: why it ended with this event. A step that
    verified a draft may bring a request several events, of which only the last can have one.
    """

    request: Request
    token: int | None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


class StepDone(NamedTuple):
    """A step that is over, for those who watch: its works, and when it began, had its logits, and ended.

    Seconds of time.perf_counter. The decoder's `routes` are still this step's. kept: rows of each work that
    were no rejected draft.
    """

    works: list[Work]
    begin: float
    computed: float
    end: float
    kept: list[int]


class Engine:
    """Runs many requests over one decoder. Belongs to one thread; `step` does all the work.

    A request ends with its finish_reason set: STOP (a stop id, which is appended to `tokens` but is no
    event's token), LENGTH (max_tokens or the context is full), ABORT, ERROR (`error` says why).
    observers: called after every step that did not fail, in the engine's thread. speculator: proposes tokens
    that a step verifies beside the next one; None: a step is a token. It changes no text, only when it comes.
    """

    def __init__(
        self, decoder: Decoder, options: EngineOptions, speculator: Speculator | None = None
    ) -> None:
        self.decoder = decoder
        self.options = options
        self.kv = KvSpec.of(decoder.spec, options.page_tokens, options.kv_dtype)
        cache = decoder.backend.kv_cache(self.kv, options.pages)
        self.executor = Executor(decoder, cache)
        most = options.pages if options.host_pages == 0 else cache.most_pages
        total = most + max(0, options.host_pages - SPARE)
        self.pages = KvPages(total, options.page_tokens, options.share_prefixes)
        self.tiers = self._make_tiers(cache) if options.host_pages else None
        self.share = PrefillShare(options.chunk, options.decode_seconds, options.token_seconds)
        self.scheduler = Scheduler(
            self.pages,
            options.context,
            options.chunk,
            options.max_running,
            self.tiers,
            most,
            options.logit_rows,
            self.share.tokens,
        )
        self.metrics = Metrics()
        self.speculator = speculator
        self.observers: list[Callable[[StepDone], None]] = []
        self.placement: Placement | None = None  # what load_engine bound to memory nodes
        self.heat_fault = ""  # why what earlier runs noted of the experts is of no use
        self._requests: dict[str, Request] = {}
        self._samplers: dict[str, Sampler] = {}

    @property
    def kv_place(self) -> str:
        """What memory the KV cache is, e.g. "512 MiB in transparent huge pages"; for the log."""
        place: str = self.executor.cache.place
        return place

    @property
    def kv_memory(self) -> NDArray[np.uint8] | None:
        """The host memory of the KV cache, u8; None where it is on a device or not ours to know."""
        memory: NDArray[np.uint8] | None = getattr(self.executor.cache, "host_memory", None)
        return memory

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def add(self, request: Request, sampler: Sampler | None = None) -> None:
        """Queue a request; with max_tokens 0 it ends at once. sampler: instead of one by request.sampling.

        Raises RequestError (ids outside the vocabulary, an id in use), ContextOverflowError (the prompt
        leaves no room for a token) or CapacityError (its worst case exceeds all pages).
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", remedy="choose another")
        self.check(request)
        if request.sampling.max_tokens == 0 and not request.scored:
            request.finish_reason = FinishReason.LENGTH
            return
        self.scheduler.add(request)
        if sampler is None:
            sampler = self._sampler(request)
        self._samplers[request.request_id] = sampler
        self._requests[request.request_id] = request
        self.metrics.start(request.request_id)

    def step(self) -> list[Event]:
        """Compute one batch; the events are in order of admission. Nothing to do: no events.

        What goes wrong in a batch ends its requests with ERROR, for nobody knows how far their KV came; the
        others and the engine go on. Only what is no Exception (Ctrl-C) gets through, and leaves the batch to
        the caller: `abort` its requests or drop the engine.
        """
        begin = time.perf_counter()
        works = self.scheduler.schedule(self._propose())
        if not works:
            return []
        try:
            self.executor.needs = self._needs(works)
            found = self.executor.run(works)
        except Exception as error:
            failed = [self._fail(work.request, error) for work in works]
            self._settle_drafts()
            return failed
        computed = time.perf_counter()
        events, kept = [], []
        for work, rows in zip(works, found, strict=True):
            if work.request.scored and work.is_prefill and isinstance(rows, np.ndarray):
                self._score(work, rows)
            news = self._verify(work, rows) if work.completes else []
            events += news
            kept.append(work.count - len(work.draft) + max(0, len(news) - 1))
        self._measure(StepDone(works, begin, computed, time.perf_counter(), kept))
        return events

    def abort(self, request_id: str) -> bool:
        """End a request now and free its pages; False when no such request runs or waits."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        self._settle_drafts()
        return True

    def generate(
        self, request: Request, stop: Callable[[], bool] = lambda: False
    ) -> Generator[int, None, None]:
        """The tokens of one request, for callers that run one at a time (others' events would be lost).

        Closing the iterator early aborts the request, and so does `stop`, which is asked before every step:
        a long prompt takes many steps before its first token. Raises what `add` raises, and the request's
        error.
        """
        self.add(request)
        try:
            while request.finish_reason is None and not stop():
                for event in self.step():
                    if event.request is request and event.token is not None:
                        yield event.token
            if request.error is not None:
                raise request.error
        finally:
            self.abort(request.request_id)

    def check_integrity(self) -> None:
        """AssertionError when pages, queue and requests do not agree."""
        self.pages.check_integrity()
        if self.tiers is not None:
            self.tiers.check_integrity()
        scheduled = [*self.scheduler.running, *self.scheduler.waiting]
        if {id(request) for request in scheduled} != {id(request) for request in self._requests.values()}:
            raise AssertionError(f"{len(scheduled)} requests scheduled, {len(self._requests)} known")
        if self.speculator is not None:
            self.speculator.check_integrity(set(self._requests))
        if not scheduled and self.pages.free != self.pages.total:
            raise AssertionError(f"{self.pages.free} of {self.pages.total} pages free without any request")

    def _sampler(self, request: Request) -> Sampler:
        endless = request.sampling.ignore_eos and request.constraint is None
        banned = request.stop_ids if endless else ()
        known = self.options.valid_tokens
        return Sampler(
            request.sampling, known, banned, request.logit_bias, request.constraint, len(request.prompt)
        )

    def _make_tiers(self, cache: Any) -> KvTiers:
        options = self.options
        mover, border = cache.mover(options.host_pages), cache.border
        return KvTiers(self.pages, options.pages, options.host_pages, options.reserve_pages, mover, border)

    def check(self, request: Request) -> None:
        """Raise what `add` would raise, whatever else runs or waits; any thread may ask."""
        self.scheduler.check(request)
        low, high, last = min(request.prompt), max(request.prompt), self.decoder.spec.vocab - 1
        if low < 0 or high > last:
            raise RequestError(f"the prompt has token ids {low} to {high}, the vocabulary is 0 to {last}")
        biased, known = request.logit_bias, self.options.valid_tokens
        if biased and not 0 <= min(biased) <= max(biased) < known:
            raise RequestError(
                f"logit_bias has token ids {min(biased)} to {max(biased)}, the vocabulary is 0 to {known - 1}"
            )

    def _propose(self) -> Mapping[str, Sequence[int]]:
        """Drafts of those who decode."""
        speculator, running = self.speculator, self.scheduler.running
        if speculator is None:
            return {}
        try:
            if speculator.rests(running, self.metrics.total.decode):
                return {}
            rooms = self.scheduler.draft_rooms()
            asks = [Ask(request, room, self._samplers[request.request_id]) for request, room in rooms]
            return speculator.propose(asks)
        except Exception as error:
            self._give_up_drafts(error)
            return {}

    def _settle_drafts(self) -> None:
        """After the last request's end: what passes until the next one is no step's time."""
        if self.speculator is not None and not self._requests:
            self.speculator.settle()

    def _give_up_drafts(self, error: Exception) -> None:
        """Nobody needs a draft: the requests go on without."""
        self.speculator = None
        warnings.warn(f"no more speculative decoding: {error!r}", RuntimeWarning, stacklevel=3)

    def _needs(self, works: Sequence[Work]) -> Needs:
        """What of their logits the requests' samplers look at. A device may draw in a step with drafts: in
        others the best logits are read as soon."""
        drafting = self.decoder.backend.draws and any(work.draft for work in works)
        return Needs(self.options.valid_tokens, [self._need(work, drafting) for work in works])

    def _need(self, work: Work, drafting: bool) -> Need:
        request, sampler = work.request, self._samplers[work.request.request_id]
        if request.logprobs is not None or request.scored:
            return Need()
        drawing = sampler.drawing(work.logit_count) if drafting and work.logit_count else None
        return Need(sampler.enough, drawing)

    def _verify(self, work: Work, found: Rows | Verified) -> list[Event]:
        """Sample after each known token as long as the draft is what was sampled.

        A row's logits, the sampler's state and the tokens before it are then what they would have been
        without a draft, so the text is the same, bit by bit. What the rejected rows left in the KV pages lies
        behind `computed`, where the next step writes.
        """
        events = self._take_drawn(work, found) if isinstance(found, Verified) else self._sample(work, found)
        if self.speculator is not None and self.speculator.asked:
            self.speculator.verified(work, len(events) - 1)
        return events

    def _sample(self, work: Work, logits: Rows) -> list[Event]:
        request, events = work.request, []
        for row, proposed in zip(logits[-len(work.draft) - 1 :], (*work.draft, None), strict=True):
            request.computed = len(request.tokens)
            events.append(self._advance(request, row))
            if request.finish_reason is not None or events[-1].token != proposed:
                break
        return events

    def _take_drawn(self, work: Work, drawn: Verified) -> list[Event]:
        """The tokens that the device drew in the sampler's stead."""
        request, events, tokens = work.request, [], (*work.draft[: drawn.accepted], drawn.token)
        self._samplers[request.request_id].drawn(len(tokens))
        for token in tokens:
            request.computed = len(request.tokens)
            events.append(self._append(request, token, None))
            if request.finish_reason is not None:
                break
        return events

    def _advance(self, request: Request, logits: Row) -> Event:
        """Sample the next token of a request, and end the request if it is its last.

        What fails here is the request's own (its logits, its bias, its grammar): the others go on.
        """
        if request.sampling.max_tokens == 0:  # it was only scored
            return self._last(request, FinishReason.LENGTH)
        try:
            token = self._samplers[request.request_id].sample(logits, request.tokens)
            logprob = self._logprob(request, logits, token)
        except Exception as error:
            return self._fail(request, error)
        return self._append(request, token, logprob)

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None) -> Event:
        request.tokens.append(token)
        if token in request.stop_ids:
            return self._last(request, FinishReason.STOP)
        if len(request.tokens) >= self.scheduler.worst_case(request):
            return self._last(request, FinishReason.LENGTH, token, logprob)
        return Event(request, token, logprob)

    def _last(
        self,
        request: Request,
        reason: FinishReason,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
    ) -> Event:
        self._finish(request, reason)
        return Event(request, token, logprob, reason)

    def _score(self, work: Work, logits: NDArray[np.float32]) -> None:
        """What the model gave the prompt's tokens that follow each of the work's."""
        request, known = work.request, self.options.valid_tokens
        following = request.prompt[work.start + 1 : work.start + 1 + work.count]
        for row, token in zip(logits, following, strict=False):  # nothing of the prompt follows its last
            request.scores.append(token_logprob(row[:known], min(token, known - 1), request.logprobs or 0))

    def _logprob(self, request: Request, logits: Row, token: int) -> TokenLogprob | None:
        if request.logprobs is None or isinstance(logits, BestRow):
            return None
        return token_logprob(logits[: self.options.valid_tokens], token, request.logprobs)

    def _fail(self, request: Request, error: Exception) -> Event:
        request.error = error
        return self._last(request, FinishReason.ERROR)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        del self._requests[request.request_id], self._samplers[request.request_id]
        if self.speculator is not None:
            self.speculator.forget(request.request_id)

    def _measure(self, step: StepDone) -> None:
        self.share.measured(step.works, step.end - step.begin)
        read = step_bytes(self.decoder, self.kv, step.works)
        self.metrics.expert_uses.update(self.decoder.routes.used)
        self.metrics.add_step(step.works, step.kept, read, step.end - step.begin)
        if self.speculator is not None and self.speculator.asked:
            try:
                self.speculator.measured(step.works, step.kept)
            except Exception as error:  # the step's tokens are sampled: they must reach their requests
                self._give_up_drafts(error)
        self._settle_drafts()
        for observe in self.observers:
            observe(step)
