"""KV pages: no page lost, none shared, no promise broken, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from strata.core import Request, SamplingParams
from strata.errors import CapacityError
from strata.memory.kv_pages import KvPages

TOTAL, PAGE_TOKENS = 12, 8


def make_request(name: str) -> Request:
    return Request(name, [1], SamplingParams())


class PagesMachine(RuleBasedStateMachine):
    """Requests come, grow and go; a model keeps what each was promised and holds."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pages = KvPages(TOTAL, PAGE_TOKENS)
        self.promised: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self.count = 0

    @rule(target=requests, tokens=st.integers(0, 60))
    def reserve(self, tokens: int) -> Request:
        self.count += 1
        request = make_request(f"r{self.count}")
        needed = -(-tokens // PAGE_TOKENS)
        room = TOTAL - sum(self.promised.values())
        assert self.pages.fits(tokens) == (needed <= room)
        if needed > room:
            with pytest.raises(CapacityError, match=f"need {needed} KV pages, {room} of {TOTAL}"):
                self.pages.reserve(request, tokens)
            return request
        self.pages.reserve(request, tokens)
        self.promised[request.request_id], self.held[request.request_id] = needed, []
        return request

    @rule(request=requests, tokens=st.integers(0, 70))
    def extend(self, request: Request, tokens: int) -> None:
        needed = -(-tokens // PAGE_TOKENS)
        before = list(request.pages)
        if needed > self.promised.get(request.request_id, 0):
            with pytest.raises(CapacityError):
                self.pages.extend(request, tokens)
            assert request.pages == before
            return
        self.pages.extend(request, tokens)
        assert request.pages[: len(before)] == before, "pages with data must stay where they are"
        assert len(request.pages) == max(needed, len(before))
        if request.request_id in self.held:
            self.held[request.request_id] = list(request.pages)

    @rule(request=consumes(requests), twice=st.booleans())
    def release(self, request: Request, twice: bool) -> None:
        for _ in range(1 + twice):
            self.pages.release(request)
        assert request.pages == []
        self.promised.pop(request.request_id, None)
        self.held.pop(request.request_id, None)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        held = [page for pages in self.held.values() for page in pages]
        assert len(held) == len(set(held))
        assert self.pages.free == TOTAL - len(held)
        assert self.pages.unpromised == TOTAL - sum(self.promised.values())
        self.pages.check_integrity()


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_promised_pages_are_there_even_when_others_took_all_the_rest() -> None:
    pages = KvPages(4, PAGE_TOKENS)
    first, second = make_request("a"), make_request("b")
    pages.reserve(first, 2 * PAGE_TOKENS)
    pages.reserve(second, 2 * PAGE_TOKENS)
    pages.extend(second, 2 * PAGE_TOKENS)
    pages.extend(first, 2 * PAGE_TOKENS)
    assert sorted(first.pages + second.pages) == [0, 1, 2, 3]


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
        first.pages.append(pages._free.pop())
    with pytest.raises(AssertionError):
        pages.check_integrity()
