"""KV pages: no page lost, none written by two, no promise broken, whatever the order of calls.

The machine below writes into every slot of a page the whole text that its keys and values depend on, as the
backend would; a request that is given a page of another text finds out.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata.core import Request, SamplingParams
from strata.errors import CapacityError
from strata.memory.kv_pages import KvPages, PageCopy

TOTAL, PAGE_TOKENS = 10, 4

texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def make_request(name: str, prompt: list[int] | None = None) -> Request:
    return Request(name, prompt or [1], SamplingParams())


class PagesMachine(RuleBasedStateMachine):
    """Requests come, compute, and go. contents: per page, what was written to each of its places."""

    overlap = 0

    def __init__(self) -> None:
        super().__init__()
        self.pages = KvPages(TOTAL, PAGE_TOKENS)
        self.pages.overlap = self.overlap
        self.contents: list[list[object]] = [[None] * PAGE_TOKENS for _ in range(TOTAL)]
        self.running: list[Request] = []
        self.promised: dict[str, int] = {}
        self.copies: dict[str, PageCopy] = {}
        self.count = 0

    def make_copies(self) -> None:
        """What a step begins with. A request that ends before it leaves its copy unmade (Ctrl-C)."""
        for copy in self.copies.values():
            self.contents[copy.target] = list(self.contents[copy.source])
        self.copies.clear()

    @rule(prompt=texts, answer=st.integers(1, 12))
    def reserve(self, prompt: list[int], answer: int) -> None:
        self.count += 1
        request = make_request(f"r{self.count}", prompt)
        tokens = len(prompt) + answer
        if not self.pages.fits(request, tokens):
            assert -(-tokens // PAGE_TOKENS) > self.pages.unpromised, "even without sharing there is room"
            with pytest.raises(CapacityError, match=f"{self.pages.unpromised} of {TOTAL} are unpromised"):
                self.pages.reserve(request, tokens)
            assert (request.pages, request.computed) == ([], 0)
            return
        copy = self.pages.reserve(request, tokens)
        if copy is not None:
            self.copies[request.request_id] = copy
        assert request.computed < len(request.tokens), "the last token's logits are wanted"
        self.running.append(request)
        self.promised[request.request_id] = tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 6), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, count: int, token: int) -> None:
        """A step of one request: some tokens, then the next one is sampled."""
        self.make_copies()
        request = data.draw(st.sampled_from(self.running))
        count = min(count, len(request.tokens) - request.computed)
        stop = request.computed + count
        self.pages.extend(request, stop)
        for position in range(request.computed, stop):
            page = request.pages[position // PAGE_TOKENS]
            self.contents[page][position % PAGE_TOKENS] = tuple(request.tokens[: position + 1])
        request.computed = stop
        self.pages.publish(request)
        if stop == len(request.tokens) and stop < self.promised[request.request_id]:
            request.tokens.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans(), twice=st.booleans())
    def release(self, data: st.DataObject, keep: bool, twice: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.copies.pop(request.request_id, None)
        for _ in range(1 + twice):
            self.pages.release(request, keep)
        assert request.pages == []

    @invariant()
    def every_request_reads_its_own_text(self) -> None:
        for request in self.running:
            if request.request_id in self.copies:
                continue
            for position in range(request.computed):
                found = self.contents[request.pages[position // PAGE_TOKENS]][position % PAGE_TOKENS]
                assert found == tuple(request.tokens[: position + 1])

    @invariant()
    def promises_can_be_kept(self) -> None:
        needed = sum(
            -(-self.promised[request.request_id] // PAGE_TOKENS) - len(request.pages)
            for request in self.running
        )
        assert self.pages.unpromised == self.pages.free - needed >= 0
        self.pages.check_integrity()


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class OverlapMachine(PagesMachine):
    overlap = 2


TestOverlapMachine = OverlapMachine.TestCase
TestOverlapMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def computed(pages: KvPages, name: str, tokens: list[int], count: int | None = None) -> Request:
    """A request that has computed its first `count` tokens."""
    request = make_request(name, tokens)
    pages.reserve(request, len(tokens) + 1)
    pages.extend(request, len(tokens))
    request.computed = len(tokens) if count is None else count
    return request


def test_a_running_request_shares_what_it_has_computed() -> None:
    pages = KvPages(8, PAGE_TOKENS)
    first = computed(pages, "a", list(range(10)))
    pages.publish(first)
    second = make_request("b", [*range(8), 90, 91])
    assert pages.reserve(second, 12) is None
    assert second.pages == first.pages[:2] and (second.computed, second.shared) == (8, 8)
    assert pages.unpromised == 8 - 3 - 1, "b needs one page of its own"


def test_pages_are_found_after_their_request_has_gone() -> None:
    """A chat: the next turn begins with all of this one; the last page is copied, for it will be written."""
    pages = KvPages(8, PAGE_TOKENS)
    first = computed(pages, "a", list(range(10)))
    table = list(first.pages)
    pages.release(first)
    assert (pages.free, pages.kept) == (8, 3)
    second = make_request("b", list(range(15)))
    copy = pages.reserve(second, 20)
    assert second.pages[:2] == table[:2] and copy == PageCopy(table[2], second.pages[2])
    assert second.computed == 10


def test_a_whole_prompt_that_is_there_leaves_its_last_token_to_compute() -> None:
    pages = KvPages(8, PAGE_TOKENS)
    pages.release(computed(pages, "a", list(range(8))))
    second = make_request("b", list(range(8)))
    copy = pages.reserve(second, 9)
    assert second.computed == 7 and copy is not None


@pytest.mark.parametrize(("common", "pages"), [(3, 0), (4, 0), (7, 1), (8, 1), (9, 2)])
def test_the_last_token_of_a_shared_beginning_is_computed_once_more(common: int, pages: int) -> None:
    """Where somebody needs more of it than its keys and values; its page is a copy then."""
    found = KvPages(8, PAGE_TOKENS)
    found.overlap = 1
    found.release(computed(found, "a", list(range(12))))
    second = make_request("b", [*range(common), 90, 91])
    copy = found.reserve(second, 14)
    assert (second.computed, second.shared) == (common - 1, common - 1)
    assert len(second.pages) == pages + (copy is not None)
    assert (copy is None) == ((common - 1) % PAGE_TOKENS == 0)


def test_the_same_tokens_after_another_beginning_are_not_shared() -> None:
    pages = KvPages(8, PAGE_TOKENS)
    pages.release(computed(pages, "a", [1, 1, 1, 1, 7, 7, 7, 7, 7]))
    second = make_request("b", [2, 1, 1, 1, 7, 7, 7, 7, 7])
    assert pages.reserve(second, 10) is None and second.computed == 0


def test_kept_pages_make_room_the_oldest_first() -> None:
    pages = KvPages(4, PAGE_TOKENS)
    for name, token in (("a", 1), ("b", 2)):
        pages.release(computed(pages, name, [token] * 7))
    pages.release(computed(pages, "c", [3] * 7))
    assert pages.kept == 4
    again = {token: make_request(f"again {token}", [token] * 7) for token in (1, 2, 3)}
    assert [pages._match(request).pages != () for request in again.values()] == [False, True, True]


def test_what_a_failed_request_computed_is_not_found() -> None:
    pages = KvPages(8, PAGE_TOKENS)
    first = computed(pages, "a", list(range(9)))
    pages.publish(first)
    pages.release(first, keep=False)
    assert (pages.free, pages.kept) == (8, 0)


def test_a_page_whose_copy_was_never_made_is_not_found() -> None:
    """The request ended between its admission and its first step, and what it should have copied is gone."""
    pages = KvPages(8, PAGE_TOKENS)
    pages.release(computed(pages, "a", list(range(10))))
    second = make_request("b", [*range(9), 90, 91])
    copy = pages.reserve(second, 12)
    assert copy is not None and second.computed == 9
    others = computed(pages, "c", list(range(50, 50 + 5 * PAGE_TOKENS - 1)))
    assert copy.source in others.pages, "the only page that nobody holds"
    pages.release(second)
    assert copy.target not in pages._kept


def test_sharing_can_be_switched_off() -> None:
    pages = KvPages(8, PAGE_TOKENS, share=False)
    pages.release(computed(pages, "a", list(range(9))))
    second = make_request("b", list(range(9)))
    assert pages.reserve(second, 10) is None and second.computed == pages.kept == 0


def test_promised_pages_are_there_even_when_others_took_all_the_rest() -> None:
    pages = KvPages(4, PAGE_TOKENS)
    first, second = make_request("a"), make_request("b")
    pages.reserve(first, 2 * PAGE_TOKENS)
    pages.reserve(second, 2 * PAGE_TOKENS)
    pages.extend(second, 2 * PAGE_TOKENS)
    pages.extend(first, 2 * PAGE_TOKENS)
    assert sorted(first.pages + second.pages) == [0, 1, 2, 3]


def test_a_request_cannot_take_more_than_it_reserved() -> None:
    pages = KvPages(4, PAGE_TOKENS)
    request = make_request("a")
    pages.reserve(request, 5)
    pages.extend(request, 3)
    before = list(request.pages)
    with pytest.raises(CapacityError, match="9 tokens need 3 KV pages, 2 are reserved"):
        pages.extend(request, 9)
    assert request.pages == before


def test_reserving_twice_is_a_mistake() -> None:
    pages = KvPages(4, PAGE_TOKENS)
    request = make_request("a")
    pages.reserve(request, 1)
    with pytest.raises(ValueError, match="a has reserved"):
        pages.reserve(request, 1)


@pytest.mark.parametrize("damage", ["lost", "shared", "beyond promise"])
def test_integrity_check_sees_damage(damage: str) -> None:
    pages = KvPages(4, PAGE_TOKENS)
    first, second = make_request("a"), make_request("b")
    pages.reserve(first, PAGE_TOKENS)
    pages.reserve(second, PAGE_TOKENS)
    pages.extend(first, 1)
    pages.extend(second, 1)
    pages.check_integrity()
    if damage == "lost":
        first.pages.clear()
    elif damage == "shared":
        first.pages[0] = second.pages[0]
    else:
        first.pages.append(pages._take())
    with pytest.raises(AssertionError):
        pages.check_integrity()
