"""The scheduler without a model: who runs when, and that nobody fails for want of a page."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core import FinishReason, Request, SamplingParams
from strata.engine.executor import build_batch
from strata.engine.scheduler import MOST_OVERTAKEN, Scheduler, Work
from strata.errors import CapacityError, ContextOverflowError
from strata.memory.kv_pages import KvPages

PAGE = 4


def make_request(name: str, prompt: int, max_tokens: int | None = 8) -> Request:
    """No two names begin alike, so that nothing is shared."""
    first = sum(ord(letter) << 8 * place for place, letter in enumerate(name[:4]))
    return Request(name, [first, *range(1, prompt)], SamplingParams(max_tokens=max_tokens))


def make_scheduler(pages: int = 100, context: int = 64, chunk: int = 10, max_running: int = 8) -> Scheduler:
    return Scheduler(KvPages(pages, PAGE), context, chunk, max_running)


def carry_out(works: list[Work]) -> None:
    """What executor and sampler do to the requests."""
    for work in works:
        work.request.computed += work.count
        if work.completes:
            work.request.tokens.append(1)


def step(scheduler: Scheduler) -> list[tuple[str, int, bool]]:
    works = scheduler.schedule()
    carry_out(works)
    return [(work.request.request_id, work.count, work.completes) for work in works]


def test_prompts_go_in_chunks_beside_running_requests() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    assert step(scheduler) == [("a", 4, True)]
    scheduler.add(make_request("b", 23))
    scheduler.add(make_request("c", 5))
    assert step(scheduler) == [("a", 1, True), ("b", 10, False)]
    assert step(scheduler) == [("a", 1, True), ("b", 10, False)]
    assert step(scheduler) == [("a", 1, True), ("b", 3, True), ("c", 5, True)]
    assert step(scheduler) == [("a", 1, True), ("b", 1, True), ("c", 1, True)]


@settings(max_examples=200)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.booleans()), max_size=12),
    most_logits=st.integers(8, 24),
    drafted=st.integers(0, 16),
)
def test_no_step_wants_more_logits_than_there_is_room_for(
    arrivals: list[tuple[int, int, bool]], most_logits: int, drafted: int
) -> None:
    """Arrivals: steps before it, prompt tokens, whether they are scored. Drafts are as long as allowed."""
    scheduler = Scheduler(KvPages(100, PAGE), 64, 10, 8, most_logits=most_logits)

    def go_on() -> None:
        drafts = {r.request_id: [1] * min(drafted, room) for r, room in scheduler.draft_rooms()}
        works = scheduler.schedule(drafts)
        assert works and sum(work.logit_count for work in works) <= most_logits
        for work in works:  # no proposed token is accepted
            request = work.request
            request.computed += work.count - len(work.draft)
            if work.completes:
                request.tokens.append(1)
            if len(request.tokens) >= scheduler.worst_case(request):
                scheduler.remove(request)

    for number, (steps, prompt, scored) in enumerate(arrivals):
        for _ in range(steps):
            if scheduler.running or scheduler.waiting:
                go_on()
        request = make_request(f"r{number}", prompt)
        request.scored = scored
        scheduler.add(request)
    for _ in range(600):
        if scheduler.running or scheduler.waiting:
            go_on()
    assert not scheduler.running and not scheduler.waiting


def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for pages: that one would wait for ever."""
    scheduler = make_scheduler(pages=8)
    first, large, small = make_request("first", 12), make_request("large", 20), make_request("small", 2, 2)
    for request in (first, large, small):
        scheduler.add(request)
    assert [name for name, _, _ in step(scheduler)] == ["first"]
    assert [name for name, _, _ in step(scheduler)] == ["first"]
    scheduler.remove(first)
    assert [name for name, _, _ in step(scheduler)] == ["large"]


def test_at_most_max_running() -> None:
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(make_request(name, 2))
    assert [name for name, _, _ in step(scheduler)] == ["a", "b"]


def test_priorities_overtake() -> None:
    scheduler = make_scheduler(max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5)):
        request = make_request(name, 2)
        request.priority = priority
        scheduler.add(request)
    order = []
    for _ in range(4):
        order.append(scheduler.schedule()[0].request)
        scheduler.remove(order[-1])
    assert [request.request_id for request in order] == ["c", "a", "b", "d"]
    assert not scheduler._overtaken


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.integers(1, 12)), max_size=120))
def test_nobody_is_overtaken_for_ever(arrivals: list[tuple[int, int, int]]) -> None:
    """Each arrival has a priority, and so many requests end after it. Between the arrival of a request and
    its admission at most those are admitted that were there before it, and MOST_OVERTAKEN others."""
    scheduler = make_scheduler(pages=30, max_running=2)
    ahead: dict[str, int] = {}
    admitted: list[str] = []

    def admit() -> None:
        known = {request.request_id for request in scheduler.running}
        carry_out(scheduler.schedule())
        new = [request.request_id for request in scheduler.running if request.request_id not in known]
        for name in new:
            assert len(admitted) + new.index(name) <= ahead.pop(name), name
        admitted.extend(new)

    for number, (priority, ends, prompt) in enumerate(arrivals):
        request = make_request(f"r{number}", prompt)
        request.priority = priority
        ahead[request.request_id] = len(admitted) + len(scheduler.waiting) + MOST_OVERTAKEN
        scheduler.add(request)
        for _ in range(ends):
            if scheduler.running:
                scheduler.remove(scheduler.running[0])
            admit()
    for _ in range(2 * len(arrivals) + 2):
        if scheduler.running:
            scheduler.remove(scheduler.running[0])
        admit()
    assert not scheduler.waiting and not ahead


@pytest.mark.parametrize(("prompt", "fits"), [(63, True), (64, False), (65, False)])
def test_a_prompt_must_leave_room_for_one_token(prompt: int, fits: bool) -> None:
    """case-21: prompts of context - 1, context and context + 1 tokens."""
    scheduler = make_scheduler()
    if fits:
        scheduler.add(make_request("a", prompt, None))
        return
    with pytest.raises(ContextOverflowError) as caught:
        scheduler.add(make_request("a", prompt, None))
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (prompt, 64)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(CapacityError, match="may need 15 KV pages, there are 14"):
        make_scheduler(pages=14).add(make_request("a", 20, 40))


def test_a_second_request_computes_only_what_is_new() -> None:
    """The same beginning is computed once; what follows begins in a page of its own, a copy."""
    scheduler = make_scheduler()
    first = Request("a", list(range(10)), SamplingParams(max_tokens=8))
    second = Request("b", [*range(10), 50, 51], SamplingParams(max_tokens=8))
    scheduler.add(first)
    assert step(scheduler) == [("a", 10, True)]
    scheduler.remove(first)
    scheduler.add(second)
    (work,) = scheduler.schedule()
    assert (work.start, work.count, second.shared) == (10, 2, 10)
    assert work.copy is not None and work.copy.target == second.pages[-1]


@pytest.mark.parametrize(("reason", "kept"), [(FinishReason.STOP, 3), (FinishReason.ERROR, 0)])
def test_what_a_failed_request_computed_is_not_kept(reason: FinishReason, kept: int) -> None:
    scheduler = make_scheduler()
    request = make_request("a", 10)
    scheduler.add(request)
    step(scheduler)
    request.finish_reason = reason
    scheduler.remove(request)
    assert scheduler.pages.kept == kept


def test_removing_a_waiting_request() -> None:
    scheduler = make_scheduler(max_running=1)
    a, b, c = (make_request(name, 2) for name in "abc")
    for request in (a, b, c):
        scheduler.add(request)
    step(scheduler)
    scheduler.remove(b)
    scheduler.remove(a)
    assert [name for name, _, _ in step(scheduler)] == ["c"]


def test_nothing_to_do() -> None:
    assert make_scheduler().schedule() == []


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    pages=st.integers(11, 30),
    chunk=st.integers(1, 20),
    max_running=st.integers(1, 8),
    alike=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_gets_every_token(
    requests: list[tuple[int, int]], pages: int, chunk: int, max_running: int, alike: bool
) -> None:
    """Any mix ends; batches are well-formed, prompts respect the chunk, pages cover all and come back."""
    scheduler = make_scheduler(pages, 64, chunk, max_running)
    pending = [make_request(f"r{i}", prompt, answer) for i, (prompt, answer) in enumerate(requests)]
    if alike:
        for request in pending:
            request.tokens[0] = request.prompt[0] = 0
    for request in pending:
        scheduler.add(request)
    for _ in range(1000):
        works = scheduler.schedule()
        if not works:
            break
        assert sum(work.count for work in works if work.is_prefill) <= chunk
        assert len(scheduler.running) <= max_running
        check_batch(works)
        carry_out(works)
        scheduler.pages.check_integrity()
        for request in list(scheduler.running):
            if len(request.tokens) == scheduler.worst_case(request):
                scheduler.remove(request)
    assert all(len(r.generated) == r.sampling.max_tokens for r in pending)
    assert scheduler.pages.free == scheduler.pages.unpromised == pages


def check_batch(works: list[Work]) -> None:
    """The batch holds exactly the works' tokens, and its page tables cover them."""
    batch = build_batch(works)
    assert batch.rows == sum(work.count for work in works)
    assert batch.logit_rows.tolist() == [
        sequence.first_row + sequence.count - 1
        for sequence, work in zip(batch.sequences, works, strict=True)
        if work.completes
    ]
    for sequence, work in zip(batch.sequences, works, strict=True):
        rows = slice(sequence.first_row, sequence.first_row + sequence.count)
        stop = sequence.start + sequence.count
        assert batch.token_ids[rows].tolist() == work.request.tokens[sequence.start : stop]
        assert batch.positions[rows].tolist() == list(range(sequence.start, stop))
        assert len(sequence.pages) * PAGE >= stop
