"""KV pages on two tiers: on the device while a running request needs them, else there or in the host pool.

`KvPages` decides which request holds which page; a page is a number there. Here every page that has contents
has a home: a place on the device, one in the host pool, or both while it moves. A request that takes part in
the step is seated: all its pages are on the device. Pages of nobody who is seated (kept prefixes, requests
that were preempted) are idle. Idle pages move to the host, the one that is idle for the longest time first,
when fewer than `reserve` device places are free, so that a page that is needed finds one without waiting.

There is one more place than there are pages, so that two pages can always change places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from strata.core import Request
from strata.memory.kv_pages import KvPages, PageCopy
from strata.memory.kv_places import Border, DevicePlaces, Home, PageMover, Places
from strata.memory.transfer import Transfer, TransferState

SPARE = 1
"""Places that no page may count on."""


@dataclass
class TierStatistics:
    """Pages that moved out of the device and back, and how often the host waited for a place."""

    out: int = 0
    back: int = 0
    waits: int = 0


class KvTiers:
    """See the module's text. One thread owns it; `begin_step` and `end_step` enclose what a step needs.

    device_places, host_places: pages that fit there. `pages.total` must be SPARE less than the host's and the
    most that the device can have together. reserve: of device places, kept free as far as idle pages can make
    room.
    """

    def __init__(
        self,
        pages: KvPages,
        device_places: int,
        host_places: int,
        reserve: int,
        mover: PageMover,
        border: Border | None = None,
    ) -> None:
        self.pages = pages
        self.reserve = reserve
        self.statistics = TierStatistics()
        self.device = DevicePlaces(device_places, border)
        self.host = Places(host_places)
        self._mover = mover
        self._homes: dict[int, Home] = {}
        self._moving: dict[int, None] = {}  # pages with a move under way, in the order of their moves
        # Pages on the device that no seated request holds and that are not leaving, the longest idle first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # How many seated requests (and copies of this step) need a page, and each one's pages counted there.
        self._claims: dict[int, int] = {}
        self._seated: dict[str, int] = {}
        # Pages that this step copies, and places that such pages left when they were forgotten meanwhile.
        self._sources: list[int] = []
        self._vacated: list[tuple[int, Transfer | None]] = []
        self._awaited: list[Transfer] = []  # this step's work on the device comes after these
        pages.on_blank = self._blanked

    # -- the step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The last step was handed to the device: what it copied need not stay, and moves have ended."""
        for page in self._sources:
            self._unclaim(page)
        for place, move in self._vacated:
            self.device.give(place, move)
        self._sources, self._vacated = [], []
        self._mover.poll()
        self._settle()
        self.device.narrow(self.reserve, self._mover.is_quiet)

    def end_step(self) -> None:
        """All seats of a step are taken: keep the reserve, and hand the moves to the device."""
        device = self.device
        while self._idle and (self.host.free or (device.borrowed and self.pages.kept)):
            victim = self._victim()
            own = not device.is_borrowed(self._place(victim))
            if own and self._places_soon >= self.reserve + device.borrowed:
                break
            self._evict(victim)
        self._mover.issue()
        for move in self._awaited:
            self._mover.order(move)
        self._awaited = []

    # -- who is on the device ------------------------------------------------------------------------------

    def has_room(self, tokens: int) -> bool:
        """Whether a request with that many tokens could be seated now, even if all its pages are new."""
        needed = self.pages.pages_for(tokens)
        return needed <= self._room() or needed <= self._widened(needed)

    def seat(self, request: Request, tokens: int) -> bool:
        """Bring the request's pages to the device, and give it those that it lacks for `tokens` tokens.

        False, and nothing has changed, when pages that seated requests need would have to go.
        """
        counted = self._seated.get(request.request_id, 0)
        lacking = max(0, self.pages.pages_for(tokens) - len(request.pages))
        if counted and not lacking:
            return True
        mine = request.pages[counted:]
        away = [page for page in mine if not self._is_here(page)]
        needed = lacking + len(away)
        if needed > self._room(mine) and needed > self._widened(needed, mine):
            return False
        for page in mine:  # first, so that they need not make room for the others
            if self._is_here(page):
                self._claim(page)
        self._prepare(needed)
        for page in away:
            self._claim(page)
        self.pages.extend(request, tokens)
        for page in request.pages[counted + len(mine) :]:
            self._claim(page)
        self._seated[request.request_id] = len(request.pages)
        return True

    def unseat(self, request: Request) -> None:
        """The request takes part no more: its pages are idle, its last ones for the longest time."""
        for page in reversed(request.pages[: self._seated.pop(request.request_id, 0)]):
            self._unclaim(page)

    def is_seated(self, request: Request) -> bool:
        """Whether the request's pages are on the device and stay there."""
        return request.request_id in self._seated

    def table(self, request: Request) -> list[int]:
        """The device places of a seated request's pages."""
        return [self._place(page) for page in request.pages]

    def copied(self, request: Request, copy: PageCopy) -> PageCopy | None:
        """What the device must copy so that the seated request's page `target` begins like `source`.

        None when nothing is left to do: the source came from the host straight into the target's place, or it
        is gone (room was needed) and the request computes those tokens itself.
        """
        source, target = self._homes.get(copy.source), self._homes[copy.target]
        if source is None:
            request.computed -= request.computed % self.pages.page_tokens
            request.shared = request.computed
            return None
        if source.device is not None:
            if copy.source not in self._sources:
                self._claim(copy.source)
                self._sources.append(copy.source)
            return PageCopy(source.device, self._place(copy.target))
        assert source.host is not None
        source.reader = self._mover.move(self._place(copy.target), source.host, outward=False)
        self._begin(copy.target, target, source.reader, outward=False)
        self.statistics.back += 1
        return None

    # -- room ----------------------------------------------------------------------------------------------

    @property
    def _places_soon(self) -> int:
        """Places on the device that are free, or will be by themselves."""
        leaving = sum(self._homes[page].leaving for page in self._moving)
        return self.device.free + self.device.pending + leaving

    def _room(self, mine: Sequence[int] = ()) -> int:
        """Places on the device that a request which holds the pages `mine` could get for others of its pages.

        Idle pages can go as far as the host has places, kept pages can be forgotten, or pages of the request
        come from there.
        """
        own = [home for page in mine if page not in self._claims and (home := self._homes.get(page))]
        here = sum(home.device is not None and not home.leaving for home in own)
        soon = self._places_soon - sum(home.leaving for home in own)
        arriving = sum(self._homes[page].arriving for page in self._moving)
        elsewhere = self.host.free + self.host.pending + arriving + self.pages.kept
        if soon + elsewhere:
            elsewhere += sum(home.device is None for home in own)
        return soon + min(len(self._idle) - here, elsewhere)

    def _widened(self, needed: int, mine: Sequence[int] = ()) -> int:
        """The room after slots were turned into as many places as are lacking, or as can be."""
        self.device.widen(needed - self._room(mine))
        return self._room(mine)

    def _prepare(self, count: int) -> None:
        """Let idle pages begin to leave together, so that `count` places will be free."""
        while self._places_soon < count and self._idle and (self.host.free or self.host.pending):
            self._evict(self._victim())

    def _take_device(self) -> int:
        while not self.device.free:
            homes = (self._homes[page] for page in self._moving)
            leaving = (home.move for home in homes if home.leaving)
            move = self.device.first_pending() or next(leaving, None)
            if move is not None:
                self._wait(move)
            else:
                self._evict(self._victim())
        return self.device.take()

    def _take_host(self) -> int | None:
        """A place in the pool; None when it is full of pages that stay."""
        while not self.host.free:
            homes = (self._homes[page] for page in self._moving)
            arriving = (home.move for home in homes if home.arriving and home.host is not None)
            move = self.host.first_pending() or next(arriving, None)
            if move is None:
                return None
            self._wait(move)
        return self.host.take()

    def _victim(self) -> int:
        """The page that is idle for the longest time; first those on places that expert slots gave."""
        if self.device.borrowed:
            for page in self._idle:
                if self.device.is_borrowed(self._place(page)):
                    return page
        return next(iter(self._idle))

    def _evict(self, page: int) -> None:
        """Let an idle page begin to leave; where the pool is full, the oldest kept page is forgotten."""
        home = self._homes[page]
        if home.move is not None:
            self._wait(home.move)
        place = self._take_host()
        if place is None:
            oldest = self.pages.oldest_kept
            assert oldest is not None, "neither tier has a place left"
            self.pages.forget(oldest)
            return
        del self._idle[page]
        assert home.device is not None
        home.host = place
        self._begin(page, home, self._mover.move(home.device, place, outward=True), outward=True)
        self.statistics.out += 1

    # -- pages ---------------------------------------------------------------------------------------------

    def _is_here(self, page: int) -> bool:
        home = self._homes.get(page)
        return home is not None and home.device is not None

    def _place(self, page: int) -> int:
        place = self._homes[page].device
        assert place is not None, f"page {page} is not on the device"
        return place

    def _claim(self, page: int) -> None:
        """Somebody needs the page on the device until `_unclaim`."""
        self._claims[page] = self._claims.get(page, 0) + 1
        if self._claims[page] > 1:
            return
        home = self._homes.get(page)
        if home is None:
            self._homes[page] = Home(self._take_device())
        elif home.device is None:
            self._fetch(page, home)
        elif home.leaving:
            self._recall(page, home)
        else:
            del self._idle[page]

    def _unclaim(self, page: int) -> None:
        self._claims[page] -= 1
        if not self._claims[page]:
            del self._claims[page]
            self._idle[page] = None

    def _fetch(self, page: int, home: Home) -> None:
        assert home.host is not None
        home.device = self._take_device()
        self._begin(page, home, self._mover.move(home.device, home.host, outward=False), outward=False)
        self.statistics.back += 1

    def _recall(self, page: int, home: Home) -> None:
        """A page that is leaving stays; if its bytes are being read, whoever writes to it next must wait."""
        assert home.move is not None and home.host is not None
        if not self._mover.cancel(home.move):
            self._awaited.append(home.move)
        self.host.give(home.host, home.move)
        home.host = home.move = None
        del self._moving[page]

    def _begin(self, page: int, home: Home, move: Transfer, outward: bool) -> None:
        home.move, home.outward = move, outward
        self._moving[page] = None
        if not outward:
            self._awaited.append(move)

    def _blanked(self, page: int) -> None:
        """Nobody wants the page's contents any more: its places are free when nothing uses them."""
        home = self._homes.pop(page, None)
        if home is None:
            return
        if home.move is not None:
            self._mover.cancel(home.move)
        self._idle.pop(page, None)
        self._moving.pop(page, None)
        if home.device is not None and self._claims.pop(page, 0):
            self._sources.remove(page)
            self._vacated.append((home.device, home.move))  # the step still copies it
        elif home.device is not None:
            self.device.give(home.device, home.move)
        if home.host is not None:
            self.host.give(home.host, home.move or home.reader)

    # -- moves ---------------------------------------------------------------------------------------------

    def _wait(self, move: Transfer) -> None:
        """The host waits for a move: somebody needs its place now."""
        self._mover.issue()
        self._mover.finish(move)
        self.statistics.waits += 1
        self._settle()

    def _settle(self) -> None:
        """Pages whose moves have ended lie where they went."""
        for page in list(self._moving):
            home = self._homes[page]
            if home.move is None or home.move.state is not TransferState.DONE:
                continue
            if home.outward and home.device is not None:
                self.device.give(home.device)
                home.device = None
            elif not home.outward and home.host is not None:
                self.host.give(home.host, home.reader)
                home.host = None
            home.move = None
            del self._moving[page]
        self.device.settle()
        self.host.settle()

    # -- accounts ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every place has one use, every page of a seated request is on the device (AssertionError)."""
        homes = self._homes
        on_device = {page: home.device for page, home in homes.items() if home.device is not None}
        in_host = {page: home.host for page, home in homes.items() if home.host is not None}
        vacated = [place for place, _ in self._vacated]
        self.device.check("device", [*on_device.values(), *vacated])
        self.host.check("host", list(in_host.values()))
        leaving = {page for page, home in homes.items() if home.leaving}
        if set(self._idle) != set(on_device) - set(self._claims) - leaving:
            raise AssertionError(f"idle are {list(self._idle)}, claimed {self._claims}, leaving {leaving}")
        if not set(self._claims) <= set(on_device) - leaving:
            raise AssertionError(f"claimed are {self._claims}, on the device {on_device}, leaving {leaving}")
        if set(self._moving) != {page for page, home in homes.items() if home.move is not None}:
            raise AssertionError(f"{list(self._moving)} are said to move")
        for page, home in homes.items():
            if home.device is None and (home.host is None or home.move is not None):
                raise AssertionError(f"page {page} is nowhere: {home}")
            if home.move is None and home.device is not None and home.host is not None:
                raise AssertionError(f"page {page} is in two places and does not move")
