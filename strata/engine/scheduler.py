"""Which requests' tokens a step computes: first come, first served, prompts in chunks beside decoding."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from strata.core import Request
from strata.errors import CapacityError, ContextOverflowError
from strata.memory.kv_pages import KvPages


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one request: the next ones that are not computed yet.

    completes: all known tokens are computed afterwards, so that the next one can be sampled.
    """

    request: Request
    start: int
    count: int
    completes: bool

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
            work = _next_work(request, budget)
            if work.count:
                works.append(work)
                budget -= work.count if work.is_prefill else 0
        while budget > 0 and self._admit():
            work = _next_work(self.running[-1], budget)
            works.append(work)
            budget -= work.count
        for work in works:
            self.pages.extend(work.request, work.start + work.count)
        return works

    def remove(self, request: Request) -> None:
        """Forget a request that ended, wherever it is, and free its pages."""
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)
        self.pages.release(request)

    def _admit(self) -> bool:
        """Move the head of the queue to the running requests, if its worst case fits."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        request = self.waiting[0]
        if not self.pages.fits(self.worst_case(request)):
            return False
        self.pages.reserve(request, self.worst_case(request))
        self.running.append(self.waiting.popleft())
        return True


def _next_work(request: Request, budget: int) -> Work:
    """All uncomputed tokens of a request, prompt tokens at most `budget` of them."""
    start = request.computed
    remaining = len(request.tokens) - start
    count = min(remaining, budget) if start < len(request.prompt) else remaining
    return Work(request, start, count, completes=count == remaining)
