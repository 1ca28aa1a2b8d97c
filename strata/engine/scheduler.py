"""Which requests' tokens a step computes: first come, first served, prompts in chunks beside decoding.

Priorities let a request overtake others, each of which only so often: nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from strata.core import MOST_DRAFTED, FinishReason, Request
from strata.errors import CapacityError, ContextOverflowError
from strata.memory.kv_pages import KvPages, PageCopy
from strata.plan.options import MOST_LOGITS

MOST_OVERTAKEN = 16
"""How often requests with a better priority may be admitted before one that came earlier."""

SCORED_ROWS = 64
"""Prompt tokens of a scored request per step: their logits over 151,936 tokens are 39 MB."""


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one request: the next ones that are not computed yet.

    completes: all known tokens are computed afterwards, so that the next one can be sampled. table: where the
    backend finds the request's pages. copy: to be made before any token of the step is computed, in the order
    of the works; places of the backend, too. draft: proposed tokens behind the known ones, the last of the
    `count`: whether they stay is known when the rows before them have been sampled from.
    """

    request: Request
    start: int
    count: int
    completes: bool
    table: Sequence[int]
    copy: PageCopy | None = None
    draft: tuple[int, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether prompt tokens are computed."""
        return self.start < len(self.request.prompt)

    @property
    def logit_count(self) -> int:
        """The last rows of the work whose logits are wanted: all where the prompt is scored."""
        if self.request.scored and self.is_prefill:
            return self.count
        return len(self.draft) + int(self.completes)

    @property
    def token_ids(self) -> list[int]:
        """What is computed, draft included."""
        known = self.request.tokens[self.start : self.start + self.count - len(self.draft)]
        return [*known, *self.draft]


class Placement(Protocol):
    """Where the pages of those who take part in a step are: `kv_tiers.KvTiers`, or `OnePlace`."""

    def begin_step(self) -> None:
        """Before the first seat of a step."""
        ...

    def end_step(self) -> None:
        """After the last one."""
        ...

    def has_room(self, tokens: int) -> bool:
        """Whether a new request with so many tokens could be seated."""
        ...

    def seat(self, request: Request, tokens: int) -> bool:
        """Make the request's pages usable, and give it pages for `tokens` tokens; False: others sit there."""
        ...

    def unseat(self, request: Request) -> None:
        """Its pages may be moved away; harmless when it has no seat."""
        ...

    def is_seated(self, request: Request) -> bool:
        """Whether it has a seat."""
        ...

    def table(self, request: Request) -> Sequence[int]:
        """Where the backend finds the pages of a request with a seat."""
        ...

    def copied(self, request: Request, copy: PageCopy) -> PageCopy | None:
        """The same copy in the backend's places, None if there is none to make. May lower `computed`."""
        ...


class OnePlace:
    """A page is where its number says, and all have room together."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages

    def begin_step(self) -> None:
        """Nothing moves."""

    def end_step(self) -> None:
        """Nothing moves."""

    def has_room(self, tokens: int) -> bool:
        """What was promised is there."""
        return True

    def seat(self, request: Request, tokens: int) -> bool:
        """Only what is lacking must be taken."""
        self._pages.extend(request, tokens)
        return True

    def unseat(self, request: Request) -> None:
        """Pages stay."""

    def is_seated(self, request: Request) -> bool:
        """Nobody is ever without a seat."""
        return True

    def table(self, request: Request) -> Sequence[int]:
        """The pages themselves."""
        return request.pages

    def copied(self, request: Request, copy: PageCopy) -> PageCopy | None:
        """The same."""
        return copy


class Scheduler:
    """Requests wait in one queue and run in order of admission.

    context: tokens of prompt and answer together, at most. chunk: prompt tokens per step over all
    requests; decoding requests take part in every step, and `budget`, given their number, says how many
    prompt tokens there may be beside them. A request is admitted when its worst case fits the unpromised
    pages and, with it, at most `max_running` run. most_logits: rows of a step whose logits are wanted, at
    most, which a device's memory was cut for: one of everybody who runs, drafts, and scored prompt tokens.

    With a `placement` of two tiers the worst cases of all who run fit both tiers together. A step is for
    those whose pages fit the device (most_pages at most): when they grow beyond it, the youngest lose their
    seats and go on later, from where they were. Nobody overtakes an older request, so the oldest always comes
    to its end.
    """

    def __init__(
        self,
        pages: KvPages,
        context: int,
        chunk: int,
        max_running: int,
        placement: Placement | None = None,
        most_pages: int | None = None,
        most_logits: int = MOST_LOGITS,
        budget: Callable[[int], int] | None = None,
    ) -> None:
        self.pages = pages
        self.context = context
        self.chunk = chunk
        self.max_running = max_running
        self.most_logits = most_logits
        self.placement = placement or OnePlace(pages)
        self.most_pages = pages.total if most_pages is None else most_pages
        self.waiting: list[Request] = []  # in order of arrival
        self._budget = budget or (lambda decoding: chunk)
        self._overtaken: Counter[str] = Counter()  # how often others with a better priority came before
        self.running: list[Request] = []
        self.preempted = 0  # seats taken from younger requests so far

    def check(self, request: Request) -> None:
        """Raise what `add` would raise; looks at what never changes only, so any thread may ask."""
        if len(request.prompt) >= self.context:
            raise ContextOverflowError(len(request.prompt), self.context)
        needed, there = self.pages.pages_for(self.worst_case(request)), min(self.most_pages, self.pages.total)
        if needed > there:
            raise CapacityError(
                f"the request may need {needed} KV pages, there are {there}",
                remedy="lower max_tokens, or give the KV cache more pages",
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextOverflowError for a prompt that leaves no room for one token, CapacityError when
        the worst case exceeds all pages there are.
        """
        self.check(request)
        self.waiting.append(request)

    def worst_case(self, request: Request) -> int:
        """Tokens that the request can have at its end."""
        limit = request.sampling.max_tokens
        return self.context if limit is None else min(self.context, len(request.prompt) + limit)

    def schedule(self, drafts: Mapping[str, Sequence[int]] | None = None) -> list[Work]:
        """The work of the next step, in order of admission; pages cover it. Empty when nothing waits.

        drafts: proposed tokens of running requests by id, no more than `draft_rooms` allows. A draft takes
        nobody's seat: where its pages are not to be had, the request goes on without it.
        """
        self.placement.begin_step()
        for request in self.running:
            self.pages.publish(request)
        works: list[Work] = []
        budget, all_seated = self._go_on(works, drafts or {})
        rows = self.most_logits - sum(work.logit_count for work in works)
        while all_seated and budget > 0 and rows > 0 and self._admissible():
            works.append(self._admit(budget, rows))
            budget -= works[-1].count
            rows -= works[-1].logit_count
        self.placement.end_step()
        return works

    def remove(self, request: Request) -> None:
        """Forget a request that ended, wherever it is, and free its pages."""
        self.running = [other for other in self.running if other is not request]
        self.waiting = [other for other in self.waiting if other is not request]
        del self._overtaken[request.request_id]
        self.placement.unseat(request)
        self.pages.release(request, keep=request.finish_reason is not FinishReason.ERROR)

    def draft_rooms(self) -> list[tuple[Request, int]]:
        """Those who decode, and how many proposed tokens of each the next step may verify.

        A step that keeps all of them samples one token more, which must not be beyond the request's last. All
        together, with a row for everybody who runs and for one who may be admitted, are no more than
        `most_logits`.
        """
        decoding = [request for request in self.running if request.computed >= len(request.prompt)]
        others = len(self.running) + bool(self.waiting)
        share = max(0, self.most_logits - others) // max(1, len(decoding))
        most = min(MOST_DRAFTED, share)
        rest = ((request, self.worst_case(request) - len(request.tokens) - 1) for request in decoding)
        return [(request, max(0, min(most, room))) for request, room in rest]

    def _go_on(self, works: list[Work], drafts: Mapping[str, Sequence[int]]) -> tuple[int, bool]:
        """Work of those who run already. Prompt tokens that are left for others; whether everybody sits."""
        decoding = sum(request.computed >= len(request.prompt) for request in self.running)
        budget = min(self.chunk, self._budget(decoding)) if decoding else self.chunk
        spare = self.most_logits - len(self.running)  # rows of logits beyond one of everybody
        for request in self.running:
            count = _next_count(request, budget, 1 + spare)
            if not count:
                continue
            draft = tuple(drafts.get(request.request_id, ()))[:spare]
            if draft and not self.placement.seat(request, request.computed + count + len(draft)):
                draft = ()
            if not self._seat(request, request.computed + count):
                return budget, False
            works.append(self._work(request, count, draft=draft))
            budget -= count if works[-1].is_prefill else 0
            spare -= max(0, works[-1].logit_count - 1)
        return budget, True

    def _seat(self, request: Request, tokens: int) -> bool:
        """Seat a request, if need be instead of younger ones, the youngest first."""
        while not self.placement.seat(request, tokens):
            younger = self.running[self.running.index(request) + 1 :]
            victim = next((one for one in reversed(younger) if self.placement.is_seated(one)), None)
            if victim is None:
                return False
            self.placement.unseat(victim)
            self.preempted += 1
        return True

    def _admissible(self) -> bool:
        """Whether the head of the queue may run: its worst case fits, and its prompt finds a seat now."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        head = self._head()
        return self.pages.fits(head, self.worst_case(head)) and self.placement.has_room(len(head.tokens))

    def _head(self) -> Request:
        """Who is next: the best priority, first come first, or who was overtaken too often already."""
        tired = (other for other in self.waiting if self._overtaken[other.request_id] >= MOST_OVERTAKEN)
        return next(tired, None) or min(self.waiting, key=lambda other: other.priority)

    def _admit(self, budget: int, rows: int) -> Work:
        """rows: of logits, at most."""
        request = self._head()
        place = self.waiting.index(request)
        self._overtaken.update(other.request_id for other in self.waiting[:place])
        del self.waiting[place], self._overtaken[request.request_id]
        copy = self.pages.reserve(request, self.worst_case(request))
        self.running.append(request)
        seated = self.placement.seat(request, request.computed + _next_count(request, budget, rows))
        assert seated, "there was room for the whole prompt"
        made = None if copy is None else self.placement.copied(request, copy)
        return self._work(request, _next_count(request, budget, rows), made)

    def _work(
        self, request: Request, count: int, copy: PageCopy | None = None, draft: tuple[int, ...] = ()
    ) -> Work:
        start = request.computed
        completes = start + count == len(request.tokens)
        table = self.placement.table(request)
        return Work(request, start, count + len(draft), completes, table, copy, draft)


def _next_count(request: Request, budget: int, rows: int) -> int:
    """Uncomputed tokens of a request that come next: all, but prompt tokens at most `budget`, and scored ones
    at most `rows`."""
    remaining = len(request.tokens) - request.computed
    if request.scored:
        budget = min(budget, SCORED_ROWS, rows)
    return min(remaining, budget) if request.computed < len(request.prompt) else remaining
