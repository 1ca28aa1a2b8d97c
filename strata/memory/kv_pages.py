"""Who owns which page of the KV cache. The pages' contents live in the backend.

A request reserves its worst case when it is admitted and takes pages from that promise as it grows, so
a running request never fails for want of a page.
"""

from __future__ import annotations

from strata.core import Request
from strata.errors import CapacityError


class KvPages:
    """Page tables of all running requests over `total` pages of `page_tokens` tokens each."""

    def __init__(self, total: int, page_tokens: int) -> None:
        self.total = total
        self.page_tokens = page_tokens
        # Last in, first out: a page just given back is the one whose bytes are still in the caches.
        self._free = list(range(total - 1, -1, -1))
        self._reserved: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages that no request holds (some of them may be promised)."""
        return len(self._free)

    @property
    def unpromised(self) -> int:
        """Pages that a new request may reserve."""
        return self.total - sum(self._reserved.values())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` tokens can be reserved now."""
        return self.pages_for(tokens) <= self.unpromised

    def reserve(self, request: Request, tokens: int) -> None:
        """Promise pages for `tokens` tokens; CapacityError when too few are unpromised."""
        if request.request_id in self._reserved:
            raise ValueError(f"request {request.request_id} has reserved its pages already")
        needed = self.pages_for(tokens)
        if needed > self.unpromised:
            raise CapacityError(
                f"{tokens} tokens need {needed} KV pages, {self.unpromised} of {self.total} are unpromised",
                remedy="wait for running requests to end, or lower max_tokens or the context",
            )
        self._reserved[request.request_id] = needed
        self._tables[request.request_id] = request.pages

    def extend(self, request: Request, tokens: int) -> None:
        """Append pages to the request's table until it covers `tokens` tokens.

        CapacityError beyond what the request reserved; the table is then unchanged.
        """
        reserved = self._reserved.get(request.request_id, 0)
        needed = self.pages_for(tokens)
        if needed > reserved:
            raise CapacityError(
                f"{request.request_id}: {tokens} tokens need {needed} KV pages, {reserved} are reserved",
                remedy="reserve the request's worst case before it starts",
            )
        while len(request.pages) < needed:
            request.pages.append(self._free.pop())

    def release(self, request: Request) -> None:
        """Take back everything the request holds or was promised; harmless when that is nothing."""
        if self._reserved.pop(request.request_id, None) is None:
            return
        del self._tables[request.request_id]
        self._free.extend(reversed(request.pages))
        request.pages.clear()

    def check_integrity(self) -> None:
        """Every page is free or in exactly one table, and no table exceeds its promise (AssertionError)."""
        held = [page for table in self._tables.values() for page in table]
        if sorted(held + self._free) != list(range(self.total)):
            raise AssertionError(
                f"{len(held)} held and {len(self._free)} free pages are not the {self.total}"
            )
        if sum(self._reserved.values()) > self.total:
            raise AssertionError(f"{sum(self._reserved.values())} pages promised of {self.total}")
        for request_id, table in self._tables.items():
            if len(table) > self._reserved[request_id]:
                raise AssertionError(
                    f"{request_id} holds {len(table)}, reserved {self._reserved[request_id]}"
                )
