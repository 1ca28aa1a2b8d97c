"""Which requests' tokens a step computes: first come, first served, prompts in chunks beside decoding."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from strata.core import FinishReason, Request
from strata.errors import CapacityError, ContextOverflowError
from strata.memory.kv_pages import KvPages, PageCopy


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one request: the next ones that are not computed yet.

    completes: all known tokens are computed afterwards, so that the next one can be sampled. copy: to be made
    before any token of the step is computed, in the order of the works.
    """

    request: Request
    start: int
    count: int
    completes: bool
    copy: PageCopy | None = None

    @property
    def is_prefill(self) -> bool:
        """Whether prompt tokens are computed."""
        return self.start < len(self.request.prompt)


class Scheduler:
    """Requests wait in one queue and run in order of admission.

    context: tokens of prompt and answer together, at most. chunk: prompt tokens per step over all
    requests; decoding requests take part in every step. A request is admitted when its worst case fits
    the unpromised pages and, with it, at most `max_running` run.
    """

    def __init__(self, pages: KvPages, context: int, chunk: int, max_running: int) -> None:
        self.pages = pages
        self.context = context
        self.chunk = chunk
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextOverflowError for a prompt that leaves no room for one token, CapacityError when
        the worst case exceeds all pages there are.
        """
        if len(request.prompt) >= self.context:
            raise ContextOverflowError(len(request.prompt), self.context)
        needed = self.pages.pages_for(self.worst_case(request))
        if needed > self.pages.total:
            raise CapacityError(
                f"the request may need {needed} KV pages, there are {self.pages.total}",
                remedy="lower max_tokens, or give the KV cache more pages",
            )
        self.waiting.append(request)

    def worst_case(self, request: Request) -> int:
        """Tokens that the request can have at its end."""
        limit = request.sampling.max_tokens
        return self.context if limit is None else min(self.context, len(request.prompt) + limit)

    def schedule(self) -> list[Work]:
        """The work of the next step, in order of admission; pages cover it. Empty when nothing waits."""
        budget = self.chunk
        works: list[Work] = []
        for request in self.running:
            self.pages.publish(request)
            work = _next_work(request, budget)
            if work.count:
                works.append(work)
                budget -= work.count if work.is_prefill else 0
        while budget > 0 and self._admissible():
            request = self.waiting.popleft()
            copy = self.pages.reserve(request, self.worst_case(request))
            self.running.append(request)
            works.append(_next_work(request, budget, copy))
            budget -= works[-1].count
        for work in works:
            self.pages.extend(work.request, work.start + work.count)
        return works

    def remove(self, request: Request) -> None:
        """Forget a request that ended, wherever it is, and free its pages."""
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)
        self.pages.release(request, keep=request.finish_reason is not FinishReason.ERROR)

    def _admissible(self) -> bool:
        """Whether the head of the queue may run: its worst case fits."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        return self.pages.fits(self.waiting[0], self.worst_case(self.waiting[0]))


def _next_work(request: Request, budget: int, copy: PageCopy | None = None) -> Work:
    """All uncomputed tokens of a request, prompt tokens at most `budget` of them."""
    start = request.computed
    remaining = len(request.tokens) - start
    count = min(remaining, budget) if start < len(request.prompt) else remaining
    return Work(request, start, count, count == remaining, copy)
