"""Who owns which page of the KV cache. The pages' contents live in the backend.

A request reserves its worst case when it is admitted and takes pages from that promise as it grows, so
a running request never fails for want of a page. Pages whose tokens are the beginning of a new request's are
shared, and those that nobody holds any more are kept for the next request until their room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from strata.core import Request
from strata.errors import CapacityError
from strata.memory.prefix_tree import Match, Node, PrefixTree


class PageCopy(NamedTuple):
    """A page whose contents must be copied, in all layers, before the step that writes to `target`."""

    source: int
    target: int


@dataclass
class _Account:
    """What a request was promised, the table it fills, and how much of it is in the tree."""

    reserved: int
    table: list[int]
    node: Node
    published: int

    @property
    def growth(self) -> int:
        return self.reserved - len(self.table)


class KvPages:
    """Page tables of all running requests over `total` pages of `page_tokens` tokens each.

    share False: no request ever gets a page that another one computed. A page is a number: where its bytes
    lie is the backend's business, or that of `kv_tiers`, which sets `on_blank` to learn which pages' bytes
    nobody wants any more. overlap: tokens at the end of a shared beginning that are computed once more, for
    somebody who needs more of them than their keys and values.
    """

    def __init__(self, total: int, page_tokens: int, share: bool = True) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.share = share
        self.overlap = 0
        self.on_blank: Callable[[int], None] = lambda page: None
        # Last in, first out: a page just given back is the one whose bytes are still in the caches.
        self._blank = list(range(total - 1, -1, -1))
        # Nobody holds these, but they can be found; the one that was not used for the longest time is first.
        # A request gives its pages back last page first, so a page never goes before those that follow it.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * total
        self._tree = PrefixTree(page_tokens)
        self._accounts: dict[str, _Account] = {}

    @property
    def free(self) -> int:
        """Pages that no request holds (some of them may be promised)."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """Free pages whose contents a later request may share."""
        return len(self._kept)

    @property
    def oldest_kept(self) -> int | None:
        """The page that is forgotten next."""
        return next(iter(self._kept), None)

    @property
    def unpromised(self) -> int:
        """Pages that a new request may reserve."""
        return self.free - sum(account.growth for account in self._accounts.values())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def reserve(self, request: Request, tokens: int) -> PageCopy | None:
        """Promise pages for `tokens` tokens, some of which may be there already: see `request.computed`.

        At least the request's last token is left to compute. Returns the copy that must be made before the
        request's first step. CapacityError when too few pages are unpromised; nothing has changed then.
        """
        if request.request_id in self._accounts:
            raise ValueError(f"request {request.request_id} has reserved its pages already")
        match = self._match(request)
        reserved, needed = self.pages_for(tokens), self._needed(tokens, match)
        if needed > self.unpromised:
            raise CapacityError(
                f"{tokens} tokens need {needed} KV pages, {self.unpromised} of {self.total} are unpromised",
                remedy="wait for running requests to end, or lower max_tokens or the context",
            )
        for page in match.pages:
            self._hold(page)
        request.pages += match.pages
        node = match.node or self._tree.root
        self._accounts[request.request_id] = _Account(reserved, request.pages, node, len(match.pages))
        request.computed = request.shared = len(match.pages) * self.page_tokens + match.common
        return None if match.partial is None else self._copied(request, match.partial)

    def fits(self, request: Request, tokens: int) -> bool:
        """Whether `reserve` would succeed now."""
        # The match is worth looking for only where it decides.
        free = self.unpromised
        return self.pages_for(tokens) <= free or self._needed(tokens, self._match(request)) <= free

    def extend(self, request: Request, tokens: int) -> None:
        """Append pages to the request's table until it covers `tokens` tokens.

        CapacityError beyond what the request reserved; the table is then unchanged.
        """
        account = self._accounts.get(request.request_id)
        reserved, needed = account.reserved if account else 0, self.pages_for(tokens)
        if needed > reserved:
            raise CapacityError(
                f"{request.request_id}: {tokens} tokens need {needed} KV pages, {reserved} are reserved",
                remedy="reserve the request's worst case before it starts",
            )
        while len(request.pages) < needed:
            request.pages.append(self._take())

    def publish(self, request: Request) -> None:
        """Let other requests find the pages that the request has filled: all tokens below `computed`."""
        account = self._accounts[request.request_id]
        while self.share and (account.published + 1) * self.page_tokens <= request.computed:
            self._publish(account, request, self.page_tokens)

    def release(self, request: Request, keep: bool = True) -> None:
        """Take back everything the request holds or was promised; harmless when that is nothing.

        keep False: what it computed is wrong and must not be found.
        """
        account = self._accounts.get(request.request_id)
        if account is None:
            return
        if keep:
            self.publish(request)
            rest = request.computed - account.published * self.page_tokens
            # A request that computed nothing of its own may have ended before its copy was made.
            if self.share and rest > 0 and request.computed > request.shared:
                self._publish(account, request, rest)
        else:
            self._forget(account.table)
        del self._accounts[request.request_id]
        for page in reversed(request.pages):
            self._drop(page)
        request.pages.clear()

    def forget(self, page: int) -> None:
        """Let a kept page, and those that were computed after it, be found no more."""
        self._unpublish(page)

    def _match(self, request: Request) -> Match:
        # A scored prompt needs the logits of all its tokens.
        if not self.share or request.scored:
            return Match()
        match = self._tree.match(request.tokens[:-1])
        common = len(match.pages) * self.page_tokens + match.common
        return self._tree.match(request.tokens[: max(0, common - self.overlap)]) if self.overlap else match

    def _needed(self, tokens: int, match: Match) -> int:
        """Free pages that a request with this match takes away from others."""
        shared_with_running = sum(1 for page in match.pages if self._holders[page])
        return self.pages_for(tokens) - shared_with_running

    def _copied(self, request: Request, source: int) -> PageCopy | None:
        """Copy on write: a page for the request that begins like `source`."""
        if source in self._kept and self.free == 1:
            # The last free page of all: its contents are where they should be.
            self._tree.remove(source)
            self._hold(source)
            request.pages.append(source)
            return None
        if source in self._kept:
            self._kept.move_to_end(source)
        request.pages.append(self._take())
        return PageCopy(source, request.pages[-1])

    def _publish(self, account: _Account, request: Request, count: int) -> None:
        index = account.published
        account.published += 1
        if not self._tree.attached(account.node):
            return
        start = index * self.page_tokens
        tokens = tuple(request.tokens[start : start + count])
        account.node = self._tree.add(account.node, account.table[index], tokens)

    def _forget(self, table: list[int]) -> None:
        """Unpublish all pages: which of them the fault came from is not known."""
        for page in table:
            if page in self._tree:
                self._unpublish(page)

    def _unpublish(self, page: int) -> None:
        """Kept pages that cannot be found any more are blank."""
        for gone in self._tree.remove(page):
            if gone in self._kept:
                del self._kept[gone]
                self._blanked(gone)

    def _take(self) -> int:
        """A free page, blank ones first. Its contents are lost."""
        if not self._blank:
            self._unpublish(next(iter(self._kept)))
        page = self._blank.pop()
        self._holders[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self._holders[page] += 1

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._tree:
            self._kept[page] = None
        else:
            self._blanked(page)

    def _blanked(self, page: int) -> None:
        self._blank.append(page)
        self.on_blank(page)

    def check_integrity(self) -> None:
        """Every page is blank, kept or in as many tables as it has holders, and no table exceeds its promise.

        AssertionError otherwise.
        """
        counts = [0] * self.total
        for account in self._accounts.values():
            for page in account.table:
                counts[page] += 1
        unheld = sorted([*self._blank, *self._kept])
        if counts != self._holders or unheld != [page for page, count in enumerate(counts) if not count]:
            raise AssertionError(f"{sum(counts)} pages in tables and {len(unheld)} free of {self.total}")
        if any(page in self._tree for page in self._blank) or any(p not in self._tree for p in self._kept):
            raise AssertionError("blank pages can be found, or kept ones cannot")
        if self.unpromised < 0:
            raise AssertionError(f"{-self.unpromised} more pages are promised than there are")
        for request_id, account in self._accounts.items():
            if account.growth < 0:
                raise AssertionError(f"{request_id} holds {len(account.table)}, reserved {account.reserved}")
